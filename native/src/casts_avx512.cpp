#include "casts_loops.hpp"

const tersegrad::casts::Table tersegrad::casts::avx512_table = tersegrad::casts::local_table;
