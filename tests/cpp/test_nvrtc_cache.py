"""benchmarks/nvrtc_cache.c: kernels that one process compiled are another's, with a stand-in for TensorRT's library."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "benchmarks" / "nvrtc_cache.c"
# The pointers that libnvinfer exports, read-only after loading as there. "Compiling" appends the options to the source.
STAND_IN = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { char text[256]; } program;
static int create(void **p, const char *source, const char *name, int n, const char *const *a, const char *const *b) {
  (void)name, (void)n, (void)a, (void)b;
  program *made = calloc(1, sizeof *made);
  strcpy(made->text, source);
  *p = made;
  return 0;
}
static int compile(void *p, int n, const char *const *options) {
  if (strstr(((program *)p)->text, "wrong")) return 6;
  for (int i = 0; i < n; i++) strcat(((program *)p)->text, options[i]);
  puts("compiled");
  fflush(stdout);
  return 0;
}
static int destroy(void **p) { free(*p); *p = 0; return 0; }
static int name(void *p, const char *expression) { (void)p, (void)expression; return 0; }
static int lowered(void *p, const char *expression, const char **out) { (void)p; *out = expression + 1; return 0; }
static int size(void *p, size_t *out) { *out = strlen(((program *)p)->text) + 1; return 0; }
static int bytes(void *p, char *out) { strcpy(out, ((program *)p)->text); return 0; }
#define POINTER(symbol, function) void *const symbol = (void *)function;
POINTER(_ZN5pwgen18nvrtcCreateProgramE, create)
POINTER(_ZN5pwgen19nvrtcCompileProgramE, compile)
POINTER(_ZN5pwgen19nvrtcDestroyProgramE, destroy)
POINTER(_ZN5pwgen22nvrtcAddNameExpressionE, name)
POINTER(_ZN5pwgen19nvrtcGetLoweredNameE, lowered)
POINTER(_ZN5pwgen17nvrtcGetCUBINSizeE, size)
POINTER(_ZN5pwgen13nvrtcGetCUBINE, bytes)
POINTER(_ZN5pwgen15nvrtcGetPTXSizeE, size)
POINTER(_ZN5pwgen11nvrtcGetPTXE, bytes)
POINTER(_ZN5pwgen22nvrtcGetProgramLogSizeE, size)
POINTER(_ZN5pwgen18nvrtcGetProgramLogE, bytes)
"""
PROGRAM = r"""
import ctypes, sys
library, cache, folder, source, option = sys.argv[1:]
print("installed", ctypes.CDLL(cache).install(library.encode(), folder.encode()))
loaded, P, S = ctypes.CDLL(library), ctypes.c_void_p, ctypes.c_char_p
def call(symbol, *types):
    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(P.in_dll(loaded, f"_ZN5pwgen{symbol}E").value)
program, size, lowered = P(), ctypes.c_size_t(), S()
call("18nvrtcCreateProgram", P, S, S, ctypes.c_int, P, P)(ctypes.addressof(program), source.encode(), b"n", 0, None, None)
call("22nvrtcAddNameExpression", P, S)(program, b"&f<1>")
options = (S * 1)(option.encode())
code = call("19nvrtcCompileProgram", P, ctypes.c_int, P)(program, 1, ctypes.addressof(options))
print("code", code)
if not code:
    for kind in ("17nvrtcGetCUBINSize", "13nvrtcGetCUBIN"), ("15nvrtcGetPTXSize", "11nvrtcGetPTX"):
        call(kind[0], P, P)(program, ctypes.addressof(size))
        text = ctypes.create_string_buffer(size.value)
        call(kind[1], P, P)(program, ctypes.addressof(text))
        print(text.value.decode())
    call("19nvrtcGetLoweredName", P, S, P)(program, b"&f<1>", ctypes.addressof(lowered))
    print(lowered.value.decode())
call("19nvrtcDestroyProgram", P)(ctypes.addressof(program))
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("nvrtc")
    (folder / "stand_in.c").write_text(STAND_IN)
    for name, source in (("stand_in", folder / "stand_in.c"), ("nvrtc_cache", SOURCE)):
        command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-z,relro,-z,now"]
        subprocess.run([*command, "-o", folder / f"{name}.so", source, "-ldl"], check=True)
    return folder


def test_a_kernel_is_compiled_once_for_all_processes(libraries, tmp_path):
    def process(source, option):
        command = [sys.executable, "-c", PROGRAM, libraries / "stand_in.so", libraries / "nvrtc_cache.so", tmp_path / "kernels"]
        return subprocess.run([*map(str, command), source, option], check=True, capture_output=True, text=True).stdout.split()

    want = ["code", "0", "x=1;-a", "x=1;-a", "f<1>"]
    assert process("x=1;", "-a") == ["installed", "0", "compiled", *want]
    # The cubin is found; PTX, which nobody asks for beside a cubin, is compiled again.
    assert process("x=1;", "-a") == ["installed", "0", *want[:3], "compiled", *want[3:]]
    assert "compiled" in process("x=1;", "-b")[:3] and "compiled" in process("x=2;", "-a")[:3]
    # What does not compile is not kept.
    for _ in range(2):
        assert process("wrong", "-a") == ["installed", "0", "code", "6"]
    assert len([path for path in (tmp_path / "kernels").iterdir() if not path.name.startswith("counts.")]) == 3
