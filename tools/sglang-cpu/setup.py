"""Adds one file that pyproject.toml cannot express: a .pth beside the packages, read when Python starts."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithPth(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copy("milkweed_sglang_cpu.pth", Path(self.build_lib) / "milkweed_sglang_cpu.pth")


setup(cmdclass={"build_py": WithPth})
