"""Compiles the loops of float-split into the wheel, where there is a C compiler; without one they run in numpy."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NAME = "ckptstore/codecs/libfused.so.1"


class FusedLoops(BuildHookInterface):
    """Builds the library. It uses no header of Python, so one build is for all versions of it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built, and before an editable installation, whose library is beside its source."""
        target = Path(self.root, "client", NAME)
        # Processes that have loaded an older one keep it: the new one takes its place at once.
        built = Path(tempfile.mkdtemp(dir=target.parent, prefix=".built-"), target.name)
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        command = [*compiler, "-O3", "-shared", "-fPIC", "-o", str(built), str(target.with_name("fused.c"))]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"no C compiler works here ({error}): float-split will be slower")
            shutil.rmtree(built.parent)  # a compiler that failed may have left something
            return
        if version == "editable":
            os.replace(built, target)
            built.parent.rmdir()
            return
        self._built = built
        build_data["force_include"][str(built)] = NAME
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called when the wheel exists."""
        if (built := getattr(self, "_built", None)) is not None:
            built.unlink()
            built.parent.rmdir()
