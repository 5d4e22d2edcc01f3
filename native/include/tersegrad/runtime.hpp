// The instruction set: chosen at run time, never visible in the bytes.
#pragma once

namespace tersegrad {

enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2 };

// The best instruction set of this machine; avx512 means F, BW, DQ, VL, VBMI and VBMI2 together.
Isa best_isa();
Isa isa();          // in use
void set_isa(Isa);  // at most best_isa()

}  // namespace tersegrad
