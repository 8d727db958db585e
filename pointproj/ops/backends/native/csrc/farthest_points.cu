// Farthest-point sampling: a cloud for each block of a GPU, or each core of a CPU.
#include "farthest_points.h"

#include "torch.h"

namespace pointproj::POINTPROJ_DEVICE {

namespace {

template <class Real>
void run(const Device& device, const FarthestPoints<Real>& task, int clouds) {
#if defined(__CUDACC__)
  farthest_points_kernel<Real><<<clouds, 32 * kTeamWarps, 0, device.stream>>>(task);
  check(cudaGetLastError());
#else
  torch::stable::parallel_for(0, clouds, 1, [&](int64_t begin, int64_t end) {
    for (int64_t cloud = begin; cloud < end; ++cloud) {
      ThreadTeam<Real> team;
      task(team, static_cast<int>(cloud));
    }
  });
#endif
}

// Rows (clouds, steps) of packed points (N, 3). `order` (N,) sorts them along a curve, one cloud after another.
Tensor farthest_points(const Tensor& points, const OptionalTensor& offsets, int64_t clouds, const Tensor& sorted,
                       const Tensor& order, const Tensor& starts, int64_t steps) {
  const Cloud cloud("points", points, offsets, clouds);
  const int64_t size = points.size(0);
  check_like("sorted", sorted, {size, 3}, points.scalar_type(), points);
  check_like("order", order, {size}, ScalarType::Long, points);
  check_like("starts", starts, {clouds}, ScalarType::Long, points);
  POINTPROJ_CHECK(steps >= 0 && steps <= kLargestInt, "steps must not be negative; got ", steps);
  const Device device(points);
  const Tensor rows = empty_longs({clouds, steps}, points), nearest = empty({size}, points);
  if (steps == 0) return rows;
  for_positions(points, [&](auto real) {
    using Real = decltype(real);
    run(device,
        FarthestPoints<Real>{data<const Real>(points), data<const Real>(sorted), data<const int64_t>(order),
                             data<Real>(nearest), cloud.batch, data<const int64_t>(starts), data<int64_t>(rows),
                             static_cast<int>(steps)},
        static_cast<int>(clouds));
  });
  return rows;
}

const Operators registered(__FILE__, {{"native_farthest_points",
                                       "(Tensor points, Tensor? offsets, SymInt clouds, Tensor sorted, Tensor order, "
                                       "Tensor starts, SymInt steps) -> Tensor",
                                       TORCH_BOX(&farthest_points)}});

}  // namespace

}  // namespace pointproj::POINTPROJ_DEVICE
