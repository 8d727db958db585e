// Farthest-point sampling: a cloud for each block of a GPU, or each core of a CPU.
#include "farthest_points.h"
#include "torch.h"

namespace pointproj::POINTPROJ_DEVICE {
namespace {

template <class Real>
void launch(const Device& device, const FarthestPoints<Real>& task, int clouds) {
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

struct Arguments {
  Tensor points;
  OptionalTensor offsets;
  int64_t clouds;
  Tensor starts;
  int64_t steps;
  POINTPROJ_FIELDS(points, offsets, clouds, starts, steps)
};

// Rows (clouds, steps) of packed points (N, 3).
Tensor farthest_points(const Arguments& given) {
  const auto& [points, offsets, clouds, starts, steps] = given;
  const PointSet set("points", points, offsets, clouds);
  const int64_t size = points.size(0);
  check_like("starts", starts, {clouds}, ScalarType::Long, points);
  POINTPROJ_CHECK(steps >= 0 && steps <= kLargestInt, "steps must not be negative; got ", steps);
  const Device device(points);
  const Tensor rows = empty_longs({clouds, steps}, points);
  if (steps == 0 || size == 0) return torch::stable::fill_(const_cast<Tensor&>(rows), -1);
  const Tensor low = call("aten::amin", "", points, std::vector<int64_t>{0}, false);
  const Tensor high = torch::stable::amax(points, 0), places = empty_longs({size}, points);
  const std::optional<int64_t> all;
  const int64_t step = greater(size / kCurveSample, int64_t(1));
  const Tensor sample = call("aten::msort", "", call("aten::slice", "Tensor", points, int64_t(0), all, all, step));
  const Tensor sorted = empty({size + kReadAhead, 4}, points), nearest = empty({size}, points);
  for_positions(points, [&](auto real) {
    using Real = decltype(real);
    const Real* const positions = data<const Real>(points);
    const SortedPoints<Real> by_place{data<Real>(sorted), size + kReadAhead};
    device.each(
        PlaceOnCurve<Real>{positions, data<const Real>(low), data<const Real>(high), data<const Real>(sample),
                           static_cast<int>(sample.size(0)), set.batch, data<int64_t>(places)},
        size);
    const Tensor order = call("aten::argsort", "", places, /*dim=*/int64_t(0), /*descending=*/false);
    device.each(ReorderPoints<Real>{positions, data<const int64_t>(order), by_place}, size);
    launch(device,
        FarthestPoints<Real>{positions, by_place, data<Real>(nearest), set.batch, data<const int64_t>(starts),
                             data<int64_t>(rows), static_cast<int>(steps)},
        static_cast<int>(clouds));
  });
  return rows;
}

const Operators registered(__FILE__, {operator_of<farthest_points>("native_farthest_points")});

}  // namespace
}  // namespace pointproj::POINTPROJ_DEVICE
