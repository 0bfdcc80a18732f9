"""Adds the Hydra configs to an installed package; everything else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Copies ``configs/`` into the package that is built."""

    def run(self) -> None:
        super().run()
        if not getattr(self, "editable_mode", False):
            shutil.copytree(
                Path(__file__).parent / "configs",
                Path(self.build_lib) / "fairseq_synth" / "configs",
                dirs_exist_ok=True,
            )


setup(cmdclass={"build_py": BuildWithConfigs})
