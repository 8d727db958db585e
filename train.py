"""Train a network: see ``python train.py --help``.

This script only passes Hydra's composed config to the package. Nothing heavy is imported before a job runs.
"""

import gc
import os
import sys
from pathlib import Path

from pointproj.doctor import require_application

require_application()  # before the application's packages are imported

import hydra
from omegaconf import DictConfig

from pointproj import command_line
from pointproj.config import HYDRA_MAIN, Config, ConfigError, register_schema
from pointproj.runtime import distributed, overrides, sweep
from pointproj.runtime.errors import exit_on_config_error, print_any_text
from pointproj.runtime.run_folder import RunError, run_name
from pointproj.runtime.signals import Stopped

register_schema()


@hydra.main(**HYDRA_MAIN, config_path="conf", config_name="train")
def hydra_main(composed: DictConfig) -> None:
    """Run one job; in a sweep, Hydra calls this for each job."""
    from pointproj.training.job import run_job

    run_job(composed)


def main() -> None:
    """Check the command line, and run all jobs; exit with 1 if one failed, with 128 + N after signal N."""
    print_any_text()
    sys.argv[1:] = command_line.overrides(sys.argv[1:], vars(Config()))
    try:
        overrides.check_arguments(sys.argv[1:], Path(__file__).parent / "conf")
        overrides.check_output(sys.argv[1:])
        os.environ["POINTPROJ_RUN"] = distributed.agree_on_run(run_name(), sys.argv[1:])
    except (ConfigError, RunError, distributed.LaunchError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    # OpenMP reads this when torch is imported; waiting threads then leave their cores to other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        with exit_on_config_error():
            hydra_main()
    except KeyboardInterrupt as error:
        stopped = error if isinstance(error, Stopped) else Stopped()
        print(stopped, file=sys.stderr)
        sys.exit(stopped.exit_code)
    finally:
        succeeded = sweep.report_started()
    gc.freeze()  # else Python looks through all objects several times when it ends, which takes a second
    sys.exit(0 if succeeded else 1)


if __name__ == "__main__":
    main()
