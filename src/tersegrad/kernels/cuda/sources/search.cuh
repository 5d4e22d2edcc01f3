// The search for a step whose error meets a target, as core/search.py and core/targets.py have it: the same operations on float64 in the same
// order, so that the step is the same bit for bit. One thread of a block runs it between looks at samples.
#include "common.cuh"

// log2 and 2^x of core/numbers.py.
__device__ double log2_of(double value) {
    if (!(value < __longlong_as_double(0x7ff0000000000000LL))) return value;
    const i64 bits = __double_as_longlong(value);
    i64 exponent = (bits >> 52) - 1022;
    double part = __longlong_as_double((bits & 0xfffffffffffffLL) | 0x3fe0000000000000LL);
    if (part < 0.7071067811865476) part *= 2.0, --exponent;
    const double s = (part - 1.0) / (part + 1.0), square = s * s;
    double total = 0.0;
#pragma unroll
    for (int k = 23; k > 1; k -= 2) total = (total + 1.0 / (double)k) * square;
    return (double)exponent + (s + s * total) * 2.8853900817779268;
}

__device__ double exp2_of(double value) {
    const double whole = floor(value + 0.5), power = (value - whole) * 0.6931471805599453;
    double total = 1.0;
#pragma unroll
    for (int k = 16; k > 0; --k) total = total * (power * (1.0 / (double)k)) + 1.0;
    return total * __longlong_as_double(((i64)whole + 1023) << 52);
}

// Python's: the first unless the second is beyond it.
__device__ __forceinline__ double least(double a, double b) { return b < a ? b : a; }
__device__ __forceinline__ double most(double a, double b) { return b > a ? b : a; }
__device__ __forceinline__ bool finite_number(double v) { return fabs(v) < __longlong_as_double(0x7ff0000000000000LL); }

__device__ float step_at(double at) {
    return __double2float_rz(least(most(exp2_of(at), 1.1754943508222875e-38), 3.4028234663852886e38));
}

// Where to look for the largest allowed place.
struct Bracket {
    double low, high, slope, tight, reach, resolution, start, at, value, refused, last_at, last_value, expected;
    i64 looks, has_at, has_refused, has_last;

    __device__ void begin(double first, double rise, double enough) {
        low = -126.0, high = 127.0, slope = expected = rise, tight = enough, reach = 4.0, resolution = 1e-3;
        start = least(most(first, low), high);
        at = value = refused = last_at = last_value = 0.0;
        looks = has_at = has_refused = has_last = 0;
    }
    __device__ bool good() const { return has_at && value >= tight; }
    __device__ void tell(double place, double found) {
        ++looks;
        if (has_last && finite_number(found) && fabs(place - last_at) > 10.0 * resolution) {
            const double rise = (found - last_value) / (place - last_at);
            if (finite_number(rise)) slope = least(most(rise, 0.125 * expected), 2.0 * expected);
        }
        last_at = place, last_value = found, has_last = 1;
        if (found <= 0.0)
            at = low = place, value = found, has_at = 1;
        else
            refused = found, high = place, has_refused = 1;
    }
    // Whether another look is worth while; `place` is where.
    __device__ bool next(double* place) {
        if (has_last && (good() || high - low < resolution)) return false;
        *place = has_last ? guess() : start;
        return true;
    }
    __device__ double guess() {
        const double aim = tight / 2.0;
        if (has_at && has_refused) {
            const double share = (aim - value) / (refused - value);
            const bool halve = looks % 4 == 0 || !(0.0 < share && share < 1.0);
            return low + (high - low) * (halve ? 0.5 : least(most(share, 0.05), 0.95));
        }
        double move = fabs(aim - last_value) / slope * __longlong_as_double((larger(0, looks - 3) + 1023) << 52);
        move = most(finite_number(move) ? least(move, reach) : reach, resolution);
        reach *= 2.0;
        return has_at ? least(last_at + move, high) : most(last_at - move, low);
    }
};

// What a search is asked for, from the host: the target for samples and its log2, how good is good enough on either sample, and the
// step's energy, as a factor and a divisor of the sample's squared norm.
struct Target {
    double aim, tight, near_tight, factor, divisor, norm;
};

__device__ double log2_error(double wrong, double norm, double aim) {
    return log2_of(most(norm > 0.0 ? wrong / norm : 0.0, 1e-300)) - log2_of(aim);
}

// A search for the step by looks at samples. `told` is what comes of it: the step, its place, the slope there, and the squared norm.
enum { TOLD_STEP, TOLD_AT, TOLD_SLOPE, TOLD_NORM };
enum { FIRST_LOOK, COARSE_LOOKS, UPPER_LOOK, LOWER_LOOK, FINE_LOOKS, ENDED };
// log2 of an error over its target from which the slope leads to the target.
#define NEAR 0.05

struct Search {
    // The step of the next look, 0 where there is none.
    double ahead;
    Bracket bracket;
    double at, upper, here;
    i64 stage, arrived;
    float step;

    __device__ void look(float by) { ahead = step = by; }
    __device__ void begin() {
        stage = FIRST_LOOK, arrived = 0;
        look(3.4028234663852886e38f);
    }
    __device__ void end(double* told, double slope) {
        bracket.begin(at, slope, 0.0);
        told[TOLD_STEP] = step_at(bracket.start), told[TOLD_AT] = bracket.start, told[TOLD_SLOPE] = slope;
        ahead = 0.0, stage = ENDED;
    }
    __device__ void look_at(double place) { at = place, look(step_at(place)); }
    // What a look has found; the next one is at `step`. `refined`: whether there is a larger sample.
    __device__ void tell(double wrong, double norm, const Target& target, bool refined, double* told) {
        if (stage == FIRST_LOOK) {
            const double seen = norm == 0.0 ? target.norm : norm;
            told[TOLD_NORM] = seen;
            if (!(seen > 0.0 && finite_number(seen))) {
                told[TOLD_STEP] = 1.1754943508222875e-38, told[TOLD_AT] = told[TOLD_SLOPE] = 0.0;
                ahead = 0.0, stage = ENDED;
                return;
            }
            bracket.begin((log2_of(target.factor * seen / target.divisor) + log2_of(target.aim)) / 2.0, 2.0, target.tight);
            look_at(bracket.start);
            stage = COARSE_LOOKS;
            return;
        }
        const double found = log2_error(wrong, norm, target.aim);
        if (stage == COARSE_LOOKS) {
            double place;
            bracket.tell(at, found);
            if (bracket.looks < 60 && bracket.next(&place)) return look_at(place);
            at = bracket.low;
            if (!refined) return end(told, 2.0);
            look(step_at(at + 0.125));
            stage = UPPER_LOOK;
        } else if (stage == UPPER_LOOK) {
            upper = found;
            look(step_at(at - 0.125));
            stage = LOWER_LOOK;
        } else if (stage == LOWER_LOOK) {
            bracket.begin(at, least(most(4.0 * (upper - found), 0.25), 4.0), target.near_tight);
            look(step_at(at));
            stage = FINE_LOOKS;
        } else if (stage == FINE_LOOKS) {
            here = found;
            bracket.tell(at, here);
            const bool far = fabs(here) >= NEAR;
            if (!bracket.good()) at = bracket.guess();
            if (bracket.looks < 4 && !bracket.good() && far) return look_at(at);
            if (bracket.has_at && far) at = bracket.at;
            end(told, bracket.slope);
        }
    }
};

// One thread goes on with a search in global memory, in memory of its own: every step of it waits for the one before.
__device__ __forceinline__ void go_on(Search* search, double wrong, double norm, const Target& target, double* told) {
    Search own = *search;
    own.arrived = 0;
    own.tell(wrong, norm, target, true, told);
    *search = own;
}
