"""Measure the backends and other libraries: ``python bench.py --help`` says how.

It passes what Hydra composed to the package. Nothing heavy is imported before a run.
"""

import sys

from pointproj.doctor import require_application

require_application()  # before its packages are imported

import hydra
from omegaconf import DictConfig

from pointproj import command_line
from pointproj.benchmark.config import BenchConfig, register_schema, to_bench_config
from pointproj.config import HYDRA_MAIN, ConfigError
from pointproj.runtime import distributed, overrides
from pointproj.runtime.errors import exit_on_config_error, exit_on_user_error, is_user_error

register_schema()


@hydra.main(**HYDRA_MAIN, config_path="conf", config_name="bench")
def bench(composed: DictConfig) -> None:
    """Run the benchmark that was composed."""
    try:
        config = to_bench_config(composed)
        from pointproj.benchmark.run import run_benchmark

        run_benchmark(config)
        distributed.leave()
    except Exception as error:
        if not is_user_error(error):
            raise
        sys.exit(f"{type(error).__name__}: {error}")  # without Hydra's own message


def main() -> None:
    """Run, and exit with 130 after Ctrl-C: the rows measured until then are in the file.

    With ``base=REV`` that commit is measured too, and the two are compared.
    """
    if any(argument.startswith(("base=", "--base")) for argument in sys.argv[1:]):
        from pointproj.benchmark import compare

        with exit_on_user_error():
            sys.exit(compare.main(sys.argv[1:]))
    sys.argv[1:] = command_line.overrides(sys.argv[1:], vars(BenchConfig()))
    try:
        overrides.check_arguments(sys.argv[1:], None, BenchConfig(), "bench.py")
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    try:
        with exit_on_config_error():
            bench()
    except KeyboardInterrupt:
        print("interrupted; the rows measured so far are in the file", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
