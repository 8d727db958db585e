// Sums and gradients within a radius: the warps of a block share 16 points side by side, which have nearly the same
// neighbours, and a row of values is read once for all of them. Products of 16 points with 8 candidates at a time are
// made on tensor cores.
//
// A lane, 4 g + t, has the points g and g + 8, of candidates 2 t and 2 t + 1, and of channels 8 t to 8 t + 7: the
// layouts of mma.m16n8k8, whose columns and inner dimension are ordered so that lanes read whole words of rows.
#include "cuda.cuh"
#include "tensor_cores.cuh"
#include "tile_search.cuh"

namespace pointproj {

constexpr float kMostDecay = 40;  // of a weight's logarithm within the radius: exp(40) is a number, also when multiplied

template <TileJob job>
struct Tile {
  static constexpr bool of_queries = job == TileJob::kSums || job == TileJob::kQueries;
  static constexpr bool adds = job != TileJob::kQueries;
  static constexpr bool multiplies = job == TileJob::kQueries || job == TileJob::kReferences;
  // Numbers of a point beside its row: total weight; or gradients of position and sigma, of the products, then the
  // same for products of 1, then the mean product; or gradient of position.
  static constexpr int kNumbers = job == TileJob::kQueries ? 9 : job == TileJob::kReferences ? 3 : 1;
  static constexpr int kBlocks = job == TileJob::kReferences ? 4 : multiplies ? 6 : 8;  // of a processor
  static constexpr int kEvery = (adds ? 16 : 0) + 2 * kNumbers;

  struct Memory {
    TileMemory of_warp[kTileWarps];
    float others[(kTileWarps - 1) * kEvery * 32];
    float anchors[kTileWarps][kTilePoints];
  };

  const RadiusTiles& task;
  Memory& memory;
  DefaultWeighting<float>::AtSigma weighting;
  int first_point, points;
  int lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  Vec3<float> q[2];
  SplitLeft own[multiplies ? 4 : 1];
  float anchor[2], inverse[2], about_mean[2];
  float row_sums[4][4] = {};  // [c % 4][2 i + c / 4]: of point g + 8 i, channel 8 t + c
  float numbers[2][kNumbers] = {};
  bool seeking = false;  // whether only the nearest is looked for

  POINTPROJ_FN Tile(const RadiusTiles& task, Memory& memory, int tile, int points)
      : task(task), memory(memory), weighting(task.problem.weighting.at_sigma()), first_point(tile * kTilePoints),
        points(points) {}

  POINTPROJ_FN void operator()() {
    const int at = first_point + (lane & 15);
    Point<float> point{{{kNan<float>, 0, 0}}, 0};
    if (at < points) point = task.problem.own(at);
    const bool there = is_finite(point.position);
    const int cloud = task.problem.own_batch.cloud_of(point.row);
    const auto take = [&](int size, unsigned group) { meet(size, group); };
    using Search = TileSearch<decltype(take)>;
    load_own(point.position, point.row);
    const bool careful = job == TileJob::kSums && !(task.problem.radius * weighting.per_sigma <= kMostDecay);
    seeking = careful;
#pragma unroll 1
    for (int pass = careful ? 0 : 1; pass < 2; ++pass) {
      Search search{task.problem, memory.of_warp[warp], take, warp};
      search(there, point.position, cloud);
      if constexpr (job == TileJob::kSums) share_anchors();
      seeking = false;
    }
    add_up();
    if (warp != 0) return;
    POINTPROJ_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = __shfl_sync(kAll, point.row, g + 8 * i);
      if (exists(i)) write(i, first_point + g + 8 * i, row);
    }
  }

  POINTPROJ_FN bool exists(int i) const { return first_point + g + 8 * i < points; }

  POINTPROJ_FN static float4 four_of(Matrix<const float> values, int row, int column) {
    if (column >= values.columns) return make_float4(0, 0, 0, 0);
    return *reinterpret_cast<const float4*>(values[row] + column);
  }

  POINTPROJ_FN void load_own(const Vec3<float>& position, [[maybe_unused]] int own_row) {
    POINTPROJ_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int at = first_point + g + 8 * i;
      POINTPROJ_UNROLL
      for (int axis = 0; axis < 3; ++axis) q[i][axis] = __shfl_sync(kAll, position[axis], g + 8 * i);
      anchor[i] = kInfinity<float>;
      if constexpr (job == TileJob::kQueries) {
        anchor[i] = exists(i) ? task.saved[2 * at] : 0.0f;
        inverse[i] = exists(i) ? task.saved[2 * at + 1] : 0.0f;
      }
      if constexpr (multiplies) {
        POINTPROJ_UNROLL
        for (int c = 0; c < 8; c += 4) {
          const float4 four = four_of(task.own_values, exists(i) ? at : 0, 8 * t + c);
          own[c / 2].set(i, four.x);
          own[c / 2].set(i + 2, four.y);
          own[c / 2 + 1].set(i, four.z);
          own[c / 2 + 1].set(i + 2, four.w);
        }
      }
      if constexpr (job == TileJob::kQueries) {
        const int row = __shfl_sync(kAll, own_row, g + 8 * i);
        float mean = 0;
        POINTPROJ_UNROLL
        for (int c = 8 * t; c < 8 * t + 8; ++c) {
          if (exists(i) && c < task.aggregated.columns) {
            mean = pointproj::multiply_add(task.own_values[at][c], task.aggregated[row][c], mean);
          }
        }
        mean += __shfl_xor_sync(kAll, mean, 1);
        about_mean[i] = mean + __shfl_xor_sync(kAll, mean, 2);
      }
    }
  }

  // Candidates that wait in the warp's memory, for those points of the tile that search here.
  POINTPROJ_FN void meet(int size, unsigned group) {
    const float limits[2] = {(group >> g & 1) != 0 ? task.problem.largest_square : -1.0f,
                             (group >> (g + 8) & 1) != 0 ? task.problem.largest_square : -1.0f};
    const float4* list = memory.of_warp[warp].candidates;
#pragma unroll 1
    for (int first = 0; first < size; first += 8) {
      float4 rows[2];
      float products[4] = {}, saved[2][3];  // of candidates that are queries: anchor, inverse and mean
      if constexpr (multiplies) multiply(products, __float_as_int(list[first + g].w));
      const float4 candidates[2] = {list[first + 2 * t], list[first + 2 * t + 1]};
      POINTPROJ_UNROLL
      for (int j = 0; j < 2; ++j) {
        const int other = __float_as_int(candidates[j].w);
        if constexpr (adds) rows[j] = four_of(task.other_values, other, 4 * g);
        if constexpr (!of_queries) {
          const float2 pair = reinterpret_cast<const float2*>(task.saved)[other];
          saved[j][0] = pair.x;
          saved[j][1] = pair.y;
          if (multiplies) saved[j][2] = task.means[other];
        }
      }
      bool within[2][2];
      float far[2][2], weights[2][2];
      POINTPROJ_UNROLL
      for (int i = 0; i < 2; ++i) {
        POINTPROJ_UNROLL
        for (int j = 0; j < 2; ++j) {
          const Vec3<float> there = {{candidates[j].x, candidates[j].y, candidates[j].z}};
          const float square = squared_distance<float>(q[i], there);
          within[i][j] = square <= limits[i];
          far[i][j] = quick_sqrt(square);
        }
      }
      if constexpr (job == TileJob::kSums) {
        anchor_all(within, far);
        if (seeking) continue;
      }
      POINTPROJ_UNROLL
      for (int i = 0; i < 2; ++i) {
        POINTPROJ_UNROLL
        for (int j = 0; j < 2; ++j) {
          float weight = weighting.weight(far[i][j], of_queries ? anchor[i] : saved[j][0]);
          if constexpr (job == TileJob::kQueries) weight *= inverse[i];
          if constexpr (!of_queries) weight *= saved[j][1];
          weights[i][j] = within[i][j] ? weight : 0.0f;
          if constexpr (job == TileJob::kSums) numbers[i][0] += weights[i][j];
          if constexpr (multiplies) {
            if (within[i][j]) add_pair(i, weight, far[i][j], products[2 * i + j], saved[j][2], candidates[j]);
          }
        }
      }
      if constexpr (adds) add_rows(weights, within, rows);
    }
  }

  // Upstream gradients times features, in the same order for both sides: of a neighbour that outweighs all others
  // nothing may remain.
  POINTPROJ_FN void multiply(float (&products)[4], int row) const {
    const float4 low = four_of(task.other_values, row, 8 * t), high = four_of(task.other_values, row, 8 * t + 4);
    multiply_add<of_queries>(products, own[0], low.x, low.y);
    multiply_add<of_queries>(products, own[1], low.z, low.w);
    multiply_add<of_queries>(products, own[2], high.x, high.y);
    multiply_add<of_queries>(products, own[3], high.z, high.w);
  }

  // Weights are relative to a neighbour: the first that is met, where they cannot vanish or grow too large then, else
  // the nearest, which has been sought.
  POINTPROJ_FN void anchor_all(const bool (&within)[2][2], const float (&far)[2][2]) {
    const bool wanted = seeking || anchor[0] == kInfinity<float> || anchor[1] == kInfinity<float>;
    if (!__any_sync(kAll, wanted)) return;
    POINTPROJ_UNROLL
    for (int i = 0; i < 2; ++i) {
      float near = lesser(within[i][0] ? far[i][0] : kInfinity<float>, within[i][1] ? far[i][1] : kInfinity<float>);
      near = lesser(near, __shfl_xor_sync(kAll, near, 1));
      near = lesser(near, __shfl_xor_sync(kAll, near, 2));
      if (seeking || anchor[i] == kInfinity<float>) anchor[i] = lesser(anchor[i], near);
    }
  }

  // The least of all warps, and what this warp has added up relative to it.
  POINTPROJ_FN void share_anchors() {
    __syncthreads();
    POINTPROJ_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (t == 0) memory.anchors[warp][g + 8 * i] = anchor[i];
    }
    __syncthreads();
    POINTPROJ_UNROLL
    for (int i = 0; i < 2; ++i) {
      float least = anchor[i];
      POINTPROJ_UNROLL
      for (int other = 0; other < kTileWarps; ++other) least = lesser(least, memory.anchors[other][g + 8 * i]);
      const float rescale = anchor[i] < kInfinity<float> ? weighting.weight(anchor[i], least) : 0.0f;
      anchor[i] = least;
      numbers[i][0] *= rescale;
      POINTPROJ_UNROLL
      for (int c = 0; c < 8; ++c) row_sums[c % 4][2 * i + c / 4] *= rescale;
    }
  }

  POINTPROJ_FN void add_pair(int i, float weight, float far, float product, float mean, const float4& there) {
    const float along[3] = {q[i][0] - there.x, q[i][1] - there.y, q[i][2] - there.z};
    const float pull = far > 0.0f ? weighting.fall(far) / far : 0.0f;
    if constexpr (job == TileJob::kReferences) {
      const float grad_logit = weight * (product - mean);
      POINTPROJ_UNROLL
      for (int axis = 0; axis < 3; ++axis) numbers[i][axis] += grad_logit * (pull * along[axis]);
    } else {
      // Sums of what is small: the mean product, which all of them lack, is known but for its last bits, and what sigma
      // wants is the same for distances relative to any other.
      const float weighted = weight * (product - about_mean[i]), beyond = far - anchor[i];
      POINTPROJ_UNROLL
      for (int axis = 0; axis < 3; ++axis) {
        numbers[i][axis] += weighted * (pull * along[axis]);
        numbers[i][4 + axis] += weight * (pull * along[axis]);
      }
      numbers[i][3] += weighted * weighting.sigma_term(beyond);
      numbers[i][7] += weight * weighting.sigma_term(beyond);
      numbers[i][8] += weighted;
    }
  }

  // What is not within the radius must be left out, not weighted with 0: it may be infinite.
  POINTPROJ_FN void add_rows(const float (&weights)[2][2], const bool (&within)[2][2], const float4 (&rows)[2]) {
    bool finite = true;
    POINTPROJ_UNROLL
    for (int j = 0; j < 2; ++j) {
      finite = finite && is_finite(rows[j].x) && is_finite(rows[j].y) && is_finite(rows[j].z) && is_finite(rows[j].w);
    }
    if (!__all_sync(kAll, finite)) return add_infinite(weights, within, rows);
    SplitLeft left;
    POINTPROJ_UNROLL
    for (int j = 0; j < 2; ++j) {
      left.set(2 * j, weights[0][j]);
      left.set(2 * j + 1, weights[1][j]);
    }
    multiply_add<true>(row_sums[0], left, rows[0].x, rows[1].x);
    multiply_add<true>(row_sums[1], left, rows[0].y, rows[1].y);
    multiply_add<true>(row_sums[2], left, rows[0].z, rows[1].z);
    multiply_add<true>(row_sums[3], left, rows[0].w, rows[1].w);
  }
  POINTPROJ_FN void add_infinite(const float (&weights)[2][2], const bool (&within)[2][2], const float4 (&rows)[2]) {
#pragma unroll 1
    for (int holder = 0; holder < 4; ++holder) {
      POINTPROJ_UNROLL
      for (int j = 0; j < 2; ++j) {
        const float row[4] = {rows[j].x, rows[j].y, rows[j].z, rows[j].w};
        POINTPROJ_UNROLL
        for (int c = 0; c < 8; ++c) {
          const float value = __shfl_sync(kAll, row[c % 4], 4 * (2 * t + c / 4) + holder);
          POINTPROJ_UNROLL
          for (int i = 0; i < 2; ++i) {
            const float weight = __shfl_sync(kAll, weights[i][j], (lane & ~3) + holder);
            const bool is_within = __shfl_sync(kAll, within[i][j] ? 1 : 0, (lane & ~3) + holder) != 0;
            float& sum = row_sums[c % 4][2 * i + c / 4];
            if (is_within) sum = pointproj::multiply_add(weight, value, sum);
          }
        }
      }
    }
  }

  // Of all warps, in the first; then numbers of a point, of all its lanes.
  POINTPROJ_FN void add_up() {
    const auto each = [&](auto visit) {
      int next = 0;
      if constexpr (adds) {
        POINTPROJ_UNROLL
        for (int i = 0; i < 16; ++i) visit(next++, row_sums[i / 4][i % 4]);
      }
      POINTPROJ_UNROLL
      for (int i = 0; i < 2 * kNumbers; ++i) visit(next++, numbers[i / kNumbers][i % kNumbers]);
    };
    if (warp > 0) {
      each([&](int i, float& x) { memory.others[((warp - 1) * kEvery + i) * 32 + lane] = x; });
    }
    __syncthreads();
    if (warp > 0) return;
    POINTPROJ_UNROLL
    for (int other = 0; other < kTileWarps - 1; ++other) {
      each([&](int i, float& x) { x += memory.others[(other * kEvery + i) * 32 + lane]; });
    }
    POINTPROJ_UNROLL
    for (int i = 0; i < 2 * kNumbers; ++i) {
      float& x = numbers[i / kNumbers][i % kNumbers];
      x += __shfl_xor_sync(kAll, x, 1);
      x += __shfl_xor_sync(kAll, x, 2);
    }
  }

  POINTPROJ_FN void write(int i, int at, int row) const {
    float scale = 1;
    if constexpr (job == TileJob::kSums) {
      const float total_inverse = weighting.inverse(numbers[i][0]);
      scale = is_finite(q[i]) ? total_inverse : kNan<float>;
      if (t == 0) {
        task.saved[2 * int64_t(at)] = anchor[i];
        task.saved[2 * int64_t(at) + 1] = total_inverse;
      }
    }
    if constexpr (multiplies) {
      if (t == 0) write_gradients(i, at, row);
    }
    if constexpr (adds) {
      POINTPROJ_UNROLL
      for (int c = 0; c < 8; ++c) {
        if (8 * t + c < task.sums.columns) task.sums[row][8 * t + c] = row_sums[c % 4][2 * i + c / 4] * scale;
      }
    }
  }
  POINTPROJ_FN void write_gradients(int i, int at, int row) const {
    float* to = task.d_points + 3 * int64_t(row);
    if constexpr (job == TileJob::kReferences) {
      POINTPROJ_UNROLL
      for (int axis = 0; axis < 3; ++axis) to[axis] = -numbers[i][axis];
    } else {
      const float mean = numbers[i][8];  // of products less about_mean
      POINTPROJ_UNROLL
      for (int axis = 0; axis < 3; ++axis) to[axis] = mean * numbers[i][4 + axis] - numbers[i][axis];
      task.means[at] = about_mean[i] + mean;
      task.sigma_rows[at] = weighting.of_sigma(numbers[i][3] - mean * numbers[i][7]);
    }
  }
};

template <class Tile>
__global__ void __launch_bounds__(32 * kTileWarps, Tile::kBlocks) tile_kernel(const RadiusTiles task, int points) {
  __shared__ typename Tile::Memory memory;
  if (!task.problem.is_dense()) return;
  Tile(task, memory, blockIdx.x, points)();
}

namespace cuda {

template <TileJob job>
void tiles(const RadiusTiles& task, int64_t points, void* stream) {
  if (points == 0) return;
  const auto blocks = static_cast<unsigned>((points + kTilePoints - 1) / kTilePoints);
  tile_kernel<Tile<job>><<<blocks, 32 * kTileWarps, 0, static_cast<cudaStream_t>(stream)>>>(task, static_cast<int>(points));
  check(cudaGetLastError());
}

template void tiles<TileJob::kSums>(const RadiusTiles&, int64_t, void*);
template void tiles<TileJob::kFeatures>(const RadiusTiles&, int64_t, void*);
template void tiles<TileJob::kQueries>(const RadiusTiles&, int64_t, void*);
template void tiles<TileJob::kReferences>(const RadiusTiles&, int64_t, void*);

}  // namespace cuda
}  // namespace pointproj
