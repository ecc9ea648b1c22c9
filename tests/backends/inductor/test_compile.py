"""Which C++ compiler a package is made with: one that links the shared C++ library."""

from __future__ import annotations

import platform
import re
import shutil

import pytest

from detrt.backends.inductor.cpp_compiler import compiler, compiler_environment, knows_vectors, links_shared
from detrt.errors import EngineError


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Compilers that only answer where libstdc++ lies, the first on the PATH; none of them is in CXX."""
    monkeypatch.delenv("CXX", raising=False)
    library = tmp_path / "libstdc++.so"
    library.write_bytes(b"\x7fELF")

    def make(place: str, answer: str, name: str = "g++"):
        folder = tmp_path / place
        folder.mkdir()
        path = folder / name
        path.write_text(f"#!/bin/sh\necho {answer}\n")
        path.chmod(0o755)
        return path

    def on_path(*compilers):
        monkeypatch.setenv("PATH", ":".join(str(c.parent) for c in compilers))

    return make, on_path, library


def test_compiler_without_its_shared_library_is_passed_over(fake, tmp_path, monkeypatch):
    make, on_path, library = fake
    (tmp_path / "dangling.so").symlink_to(tmp_path / "nowhere.so")
    whole = make("whole", str(library))
    copied = make("copied", str(tmp_path / "dangling.so"))
    bare = make("bare", "libstdc++.so", "clang++")
    assert [links_shared(str(c)) for c in (whole, copied, bare)] == [True, False, False]
    on_path(whole)
    assert compiler() == str(whole)
    monkeypatch.setenv("CXX", str(copied))
    assert compiler() == str(whole)
    on_path(bare)
    with pytest.raises(EngineError, match=re.escape(f"shared C++ library; {copied}, {bare} has none")):
        compiler()


def test_no_compiler_at_all_is_told(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match=r"neither g\+\+ nor clang\+\+ is on the PATH"):
        compiler()
    monkeypatch.setenv("CXX", "missing-compiler --flag")
    with pytest.raises(EngineError, match="'missing-compiler', which is not there"):
        compiler()


def test_a_compiler_that_knows_the_vector_extensions_is_not_tried_for_each(fake, monkeypatch):
    make, on_path, library = fake
    real = shutil.which("g++")
    monkeypatch.delenv("TORCHINDUCTOR_VEC_ISA_OK", raising=False)
    old = make("old", str(library))
    old.write_text(f"#!/bin/sh\ncase $1 in -print*) echo {library};; *) exit 1;; esac\n")
    new = make("new", str(library))
    for path, told in ((old, {}), (new, {"TORCHINDUCTOR_VEC_ISA_OK": "1"})):
        on_path(path)
        monkeypatch.setenv("PATH", f"{path.parent}:/bin")
        assert compiler_environment() == {"CXX": str(path), **told}
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
    assert compiler_environment()["TORCHINDUCTOR_VEC_ISA_OK"] == "0"
    if real is not None and platform.machine() == "x86_64":
        assert knows_vectors(real)
