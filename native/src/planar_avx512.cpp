#include "planar_loops.hpp"

namespace tersegrad::planar {
const Table table_avx512 = planar_table();
}
