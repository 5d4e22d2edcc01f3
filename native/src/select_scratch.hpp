// Buffers for a selection in progress, taken from a store that outlives the call, and the lists of coordinates that grow in them.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace tersegrad::select {

// Buffers outlive the call: fresh memory costs more in page faults than the selection itself. A few, up to 64 MiB each. Nobody waits
// for the lock, which may have been held by another thread at fork(): whoever finds it taken allocates anew.
class Buffers {
  public:
    struct Buffer {
        void* data = nullptr;
        std::size_t bytes = 0;
    };

    Buffer take() {
        const std::unique_lock lock(mutex_, std::try_to_lock);
        if (!lock || free_.empty()) return {};
        const auto most = std::max_element(free_.begin(), free_.end(), [](const Buffer& a, const Buffer& b) { return a.bytes < b.bytes; });
        const Buffer found = *most;
        free_.erase(most);
        return found;
    }

    void give(Buffer buffer) {
        if (!buffer.data) return;
        if (buffer.bytes <= std::size_t{64} << 20) {
            const std::unique_lock lock(mutex_, std::try_to_lock);
            if (lock && free_.size() < 16) {
                free_.push_back(buffer);
                return;
            }
        }
        std::free(buffer.data);
    }

    Buffers() { free_.reserve(16); }

  private:
    std::mutex mutex_;
    std::vector<Buffer> free_;
};

// Never destroyed: a thread may still be selecting when static objects go.
inline Buffers& buffers() {
    static Buffers& shared = *new Buffers;
    return shared;
}

template <class T>
class Scratch {
  public:
    Scratch() = default;
    Scratch(Scratch&& other) noexcept : buffer_(std::exchange(other.buffer_, {})) {}
    Scratch& operator=(Scratch&&) = delete;
    ~Scratch() { buffers().give(buffer_); }

    T* get() const { return static_cast<T*>(buffer_.data); }
    T& operator[](std::size_t i) const { return get()[i]; }

    void reserve(std::size_t wanted) {
        if (!buffer_.data) buffer_ = buffers().take();
        if (wanted * sizeof(T) <= buffer_.bytes) return;
        const std::size_t bytes = std::max(wanted * sizeof(T), buffer_.bytes * 2);
        void* grown = std::realloc(buffer_.data, bytes);
        if (!grown) throw std::bad_alloc();
        buffer_ = {grown, bytes};
    }

  private:
    Buffers::Buffer buffer_;
};

// A growing list of coordinates.
struct Candidates {
    std::size_t size = 0;
    Scratch<std::int32_t> indices;
    Scratch<float> values;

    void reserve(std::size_t wanted) {
        indices.reserve(wanted);
        values.reserve(wanted);
    }
};

// Sizes of the pieces that selections work in.
constexpr std::size_t block = 1 << 14;  // coordinates scanned between two looks at the buffers
constexpr std::size_t grain = 1 << 18;  // coordinates that pay for a thread

}  // namespace tersegrad::select
