// Runs an exported package without Python: run_package PACKAGE VALUES QUERIES POINTS [NORMALS]
// Queries, points and normals are files of float32, x y z of each after the other; VALUES is written.
#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <filesystem>
#include <fstream>
#include <iostream>

at::Tensor read_points(const char* path) {
  const auto count = static_cast<int64_t>(std::filesystem::file_size(path) / (3 * sizeof(float)));
  auto points = at::empty({count, 3});
  std::ifstream(path, std::ios::binary).read(static_cast<char*>(points.data_ptr()), points.nbytes());
  return points;
}

int main(int argc, char** argv) {
  if (argc < 5) {
    std::cerr << "run_package PACKAGE VALUES QUERIES POINTS [NORMALS]\n";
    return 2;
  }
  const c10::InferenceMode no_gradients;
  torch::inductor::AOTIModelPackageLoader package(argv[1]);
  const auto device = c10::Device(package.get_metadata().at("AOTI_DEVICE_KEY"));
  std::vector<at::Tensor> inputs;
  for (int i = 3; i < argc; ++i) inputs.push_back(read_points(argv[i]).to(device));
  const auto values = package.run(inputs).at(0).cpu();
  std::ofstream(argv[2], std::ios::binary).write(static_cast<const char*>(values.data_ptr()), values.nbytes());
  std::cout << values.size(0) << " values on " << device << "\n";
}
