"""Puts the mesh files, recipes and locked versions, which live outside the package, inside it when a wheel is built.

All else is in pyproject.toml. A checkout installed with `pip install -e` reads them where they are.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = {"meshes": "meshes", "recipes": "recipes", "tools/lock": "lock"}  # from the top -> inside the package


class BuildWithFiles(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for folder, name in SHIPPED.items():
                target = Path(self.build_lib, "milkweed", name)
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(
                    folder, target, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "*.pyc")
                )


setup(cmdclass={"build_py": BuildWithFiles})
