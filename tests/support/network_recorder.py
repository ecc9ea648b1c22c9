"""What a command and its children ask of the network: a preloaded library writes down each call and refuses it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Libraries find `connect` and the others here before the C library. Its own name server queries do not go through `connect`, so the
# request for a name is recorded instead. The loopback is left alone, for servers and their workers.
_SOURCE = r"""
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void record(const char* what, const char* where) {
  char line[512];
  int size = snprintf(line, sizeof line, "%s %s\n", what, where);
  int file = open(getenv("NETWORK_RECORD"), O_WRONLY | O_APPEND | O_CREAT, 0600);
  if (file >= 0 && write(file, line, size) != size) abort();
  close(file);
}

static int foreign(const char* what, const struct sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address == NULL) return 0;
  if (address->sa_family == AF_INET) inet_ntop(AF_INET, &((const struct sockaddr_in*)address)->sin_addr, text, sizeof text);
  else if (address->sa_family == AF_INET6) inet_ntop(AF_INET6, &((const struct sockaddr_in6*)address)->sin6_addr, text, sizeof text);
  else return 0;
  if (strncmp(text, "127.", 4) == 0 || strcmp(text, "::1") == 0) return 0;
  record(what, text);
  errno = ENETUNREACH;
  return 1;
}

int connect(int fd, const struct sockaddr* to, socklen_t size) {
  int (*next)(int, const struct sockaddr*, socklen_t) = dlsym(RTLD_NEXT, "connect");
  return foreign("connect", to) ? -1 : next(fd, to, size);
}

ssize_t sendto(int fd, const void* data, size_t length, int flags, const struct sockaddr* to, socklen_t size) {
  ssize_t (*next)(int, const void*, size_t, int, const struct sockaddr*, socklen_t) = dlsym(RTLD_NEXT, "sendto");
  return foreign("sendto", to) ? -1 : next(fd, data, length, flags, to, size);
}

int getaddrinfo(const char* node, const char* service, const struct addrinfo* hints, struct addrinfo** found) {
  int (*next)(const char*, const char*, const struct addrinfo*, struct addrinfo**) = dlsym(RTLD_NEXT, "getaddrinfo");
  char binary[16];
  if (node == NULL || strcmp(node, "localhost") == 0 || inet_pton(AF_INET, node, binary) == 1 || inet_pton(AF_INET6, node, binary) == 1)
    return next(node, service, hints, found);
  record("getaddrinfo", node);
  return EAI_NONAME;
}
"""


class NetworkRecorder:
    """`environment` for processes that are watched; `calls`: what they asked, e.g. "connect 192.0.2.1"."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None or sys.platform != "linux":
            pytest.skip("needs Linux and a C compiler")
        source, library = folder / "recorder.c", folder / "recorder.so"
        source.write_text(_SOURCE)
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        self._record = folder / "record.txt"
        self.environment = {"LD_PRELOAD": str(library), "NETWORK_RECORD": str(self._record)}

    @property
    def calls(self) -> list[str]:
        return self._record.read_text().splitlines() if self._record.is_file() else []
