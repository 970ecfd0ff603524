"""When this package must not be used: beside the real kernels, a CUDA torch, or another SGLang than its own."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from sglang_cpu import SGLANG

_AWAY = "pip uninstall milkweed-sglang-cpu"


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def torch_cuda() -> str | None:
    """CUDA version that the installed torch was built for; None for a CPU build or no torch.

    Read from torch's own version file, because a CUDA build without its libraries cannot even be imported.
    """
    spec = find_spec("torch")
    if spec is None or not spec.origin:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text()
    found = re.search(r"^cuda[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else None


def reasons() -> list[str]:
    """Why SGLang must not start here, one line each with its mend; empty when all is well."""
    found = []
    for kernels in ("sglang-kernel", "sgl-kernel"):
        installed = _version(kernels)
        if installed is not None:
            found.append(
                f"{kernels} {installed} is installed and both supply `sgl_kernel`. On a GPU: `{_AWAY}`, then "
                f"`pip install --force-reinstall --no-deps {kernels}=={installed}`. On a CPU: make a fresh environment"
            )
    cuda = torch_cuda()
    if cuda is not None:
        found.append(
            f"torch is a build for CUDA {cuda}. On a GPU: `{_AWAY}` and install sglang whole. "
            "On a CPU: install the CPU build of torch"
        )
    sglang = _version("sglang")
    if sglang is not None and sglang != SGLANG:
        found.append(f"sglang {sglang} is installed; this fits {SGLANG} only: `pip install --no-deps sglang=={SGLANG}`")
    return found
