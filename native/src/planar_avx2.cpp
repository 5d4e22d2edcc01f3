#include "planar_loops.hpp"

namespace tersegrad::planar {
const Table table_avx2 = planar_table();
}
