/* Compiled kernels of TensorRT 8.5's pointwise layers on disk, so that no build compiles one twice.
 *
 * The builder compiles the source of a fused pointwise layer by NVRTC for each type, layout and tile that it times: 0.3 to 0.5 s each,
 * some hundred a layer, and the same ones again in other layers, builds and processes. libnvinfer calls NVRTC by pointers that it
 * exports; `install` points them here. A program's key is a hash of its source, headers, options and name expressions.
 *
 *     gcc -O2 -shared -fPIC -o nvrtc_cache.so benchmarks/nvrtc_cache.c -ldl
 *
 * In the builder process (benchmarks/quick_build.py does it where NVRTC_CACHE names the library):
 *
 *     ctypes.CDLL("./nvrtc_cache.so").install(b"libnvinfer.so.8", b"FOLDER")   # 0: installed
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef void *handle_t; /* nvrtcProgram */
static int (*real_create)(handle_t *, const char *, const char *, int, const char *const *, const char *const *);
static int (*real_compile)(handle_t, int, const char *const *);
static int (*real_destroy)(handle_t *);
static int (*real_name)(handle_t, const char *);
static int (*real_lowered)(handle_t, const char *, const char **);
static int (*real_sizes[3])(handle_t, size_t *);
static int (*real_reads[3])(handle_t, char *);
enum { CUBIN, PTX, LOG, BLOBS };
#define MOST_NAMES 16
static char folder[4096];
static int counts_file = -1;
static struct { uint64_t found, compiled, compile_us; } counts;

typedef struct {
  char *source, *name;
  int headers;
  char **header_texts, **header_names;
  int names;
  char *expressions[MOST_NAMES], *lowered[MOST_NAMES];
  int options;
  char **option_texts;
  handle_t real; /* null while nothing had to be compiled */
  int cached;
  size_t sizes[BLOBS];
  char *blobs[BLOBS];
} program_t;

static char **copies(int count, const char *const *texts) {
  char **out = calloc(count ? count : 1, sizeof *out);
  for (int i = 0; i < count; i++) out[i] = strdup(texts[i]);
  return out;
}
static void release(int count, char **texts) {
  for (int i = 0; texts && i < count; i++) free(texts[i]);
  free(texts);
}

/* A 64-bit FNV-1a hash and a second one of other constants; a length goes in front of each text. */
static void mix(uint64_t key[2], const char *text) {
  size_t length = strlen(text);
  for (size_t i = 0; i < sizeof length + length; i++) {
    unsigned char byte = i < sizeof length ? (unsigned char)(length >> (8 * i)) : (unsigned char)text[i - sizeof length];
    key[0] = (key[0] ^ byte) * 1099511628211ull;
    key[1] = (key[1] ^ (byte + 0x9d)) * 0x9e3779b97f4a7c15ull;
    key[1] ^= key[1] >> 29;
  }
}

static int create(handle_t *out, const char *source, const char *name, int headers, const char *const *texts,
                  const char *const *names) {
  program_t *program = calloc(1, sizeof *program);
  program->source = strdup(source);
  program->name = name ? strdup(name) : NULL;
  program->headers = headers;
  program->header_texts = copies(headers, texts);
  program->header_names = copies(headers, names);
  *out = program;
  return 0;
}

static int add_name(handle_t handle, const char *expression) {
  program_t *program = handle;
  if (program->names == MOST_NAMES) return 3; /* NVRTC_ERROR_INVALID_INPUT */
  program->expressions[program->names++] = strdup(expression);
  return 0;
}

static int compile_now(program_t *program) {
  int code = real_create(&program->real, program->source, program->name, program->headers,
                         (const char *const *)program->header_texts, (const char *const *)program->header_names);
  for (int i = 0; !code && i < program->names; i++) code = real_name(program->real, program->expressions[i]);
  return code ? code : real_compile(program->real, program->options, (const char *const *)program->option_texts);
}

static int load(program_t *program, const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) return 0;
  uint64_t lengths[BLOBS + MOST_NAMES];
  int good = fread(lengths, sizeof lengths, 1, file) == 1;
  for (int i = 0; good && i < BLOBS + MOST_NAMES; i++) {
    if (!lengths[i]) continue;
    char *bytes = malloc(lengths[i]);
    good = bytes && fread(bytes, 1, lengths[i], file) == lengths[i];
    if (i < BLOBS) program->blobs[i] = bytes, program->sizes[i] = lengths[i];
    else program->lowered[i - BLOBS] = bytes;
  }
  fclose(file);
  return good;
}

static void store(program_t *program, const char *path) {
  char part[sizeof folder + 64];
  snprintf(part, sizeof part, "%s.%d", path, (int)getpid());
  FILE *file = fopen(part, "wb");
  if (!file) return;
  uint64_t lengths[BLOBS + MOST_NAMES] = {0};
  char *texts[BLOBS + MOST_NAMES] = {0};
  for (int i = 0; i < BLOBS; i++) {
    size_t size = 0;
    if (i == PTX && lengths[CUBIN]) continue; /* read from the compiler if anybody asks */
    if (real_sizes[i](program->real, &size) || !size) continue;
    texts[i] = malloc(size);
    if (real_reads[i](program->real, texts[i])) continue;
    lengths[i] = size;
  }
  for (int i = 0; i < program->names; i++) {
    const char *lowered = NULL;
    if (real_lowered(program->real, program->expressions[i], &lowered) || !lowered) continue;
    texts[BLOBS + i] = strdup(lowered);
    lengths[BLOBS + i] = strlen(lowered) + 1;
  }
  int good = fwrite(lengths, sizeof lengths, 1, file) == 1;
  for (int i = 0; i < BLOBS + MOST_NAMES; i++) {
    good = good && fwrite(texts[i], 1, lengths[i], file) == lengths[i];
    free(texts[i]);
  }
  good = !fclose(file) && good;
  if (!good || rename(part, path)) unlink(part);
}

static int compile(handle_t handle, int options, const char *const *texts) {
  program_t *program = handle;
  program->options = options;
  program->option_texts = copies(options, texts);
  uint64_t key[2] = {14695981039346656037ull, 0x243f6a8885a308d3ull};
  mix(key, program->source);
  for (int i = 0; i < program->headers; i++) mix(key, program->header_names[i]), mix(key, program->header_texts[i]);
  mix(key, "options");
  for (int i = 0; i < options; i++) mix(key, texts[i]);
  mix(key, "names");
  for (int i = 0; i < program->names; i++) mix(key, program->expressions[i]);
  char path[sizeof folder + 40];
  snprintf(path, sizeof path, "%s/%016llx%016llx", folder, (unsigned long long)key[0], (unsigned long long)key[1]);
  int code = 0;
  if ((program->cached = load(program, path))) {
    counts.found++;
  } else {
    struct timespec before, after;
    clock_gettime(CLOCK_MONOTONIC, &before);
    if (!(code = compile_now(program))) store(program, path);
    clock_gettime(CLOCK_MONOTONIC, &after);
    counts.compiled++;
    counts.compile_us += (after.tv_sec - before.tv_sec) * 1000000ll + (after.tv_nsec - before.tv_nsec) / 1000;
  }
  char line[96];
  int length = snprintf(line, sizeof line, "found %llu, compiled %llu in %.1f s   \n", (unsigned long long)counts.found,
                        (unsigned long long)counts.compiled, counts.compile_us / 1e6);
  if (counts_file >= 0 && pwrite(counts_file, line, length, 0) < 0) counts_file = -1;
  return code;
}

static int ready(program_t *program, int blob) {
  if (program->real || (program->cached && program->blobs[blob])) return 0;
  return compile_now(program);
}
#define READERS(blob)                                                     \
  static int size_##blob(handle_t handle, size_t *size) {                 \
    program_t *program = handle;                                          \
    int code = ready(program, blob);                                      \
    if (code) return code;                                                \
    if (program->real) return real_sizes[blob](program->real, size);      \
    *size = program->sizes[blob];                                         \
    return 0;                                                             \
  }                                                                       \
  static int read_##blob(handle_t handle, char *bytes) {                  \
    program_t *program = handle;                                          \
    int code = ready(program, blob);                                      \
    if (code) return code;                                                \
    if (program->real) return real_reads[blob](program->real, bytes);     \
    memcpy(bytes, program->blobs[blob], program->sizes[blob]);            \
    return 0;                                                             \
  }
READERS(CUBIN)
READERS(PTX)
READERS(LOG)

static int lowered(handle_t handle, const char *expression, const char **out) {
  program_t *program = handle;
  if (program->real) return real_lowered(program->real, expression, out);
  for (int i = 0; i < program->names; i++)
    if (!strcmp(program->expressions[i], expression) && program->lowered[i]) {
      *out = program->lowered[i];
      return 0;
    }
  return 10; /* NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID */
}

static int destroy(handle_t *handle) {
  program_t *program = *handle;
  if (program->real) real_destroy(&program->real);
  free(program->source);
  free(program->name);
  release(program->headers, program->header_texts);
  release(program->headers, program->header_names);
  release(program->options, program->option_texts);
  for (int i = 0; i < program->names; i++) free(program->expressions[i]), free(program->lowered[i]);
  for (int i = 0; i < BLOBS; i++) free(program->blobs[i]);
  free(program);
  *handle = NULL;
  return 0;
}

int install(const char *library, const char *cache) {
  void *handle = dlopen(library, RTLD_NOW);
  if (!handle) return 1;
  struct { const char *symbol; void **real; void *ours; } pointers[] = {
      {"_ZN5pwgen18nvrtcCreateProgramE", (void **)&real_create, (void *)create},
      {"_ZN5pwgen19nvrtcCompileProgramE", (void **)&real_compile, (void *)compile},
      {"_ZN5pwgen19nvrtcDestroyProgramE", (void **)&real_destroy, (void *)destroy},
      {"_ZN5pwgen22nvrtcAddNameExpressionE", (void **)&real_name, (void *)add_name},
      {"_ZN5pwgen19nvrtcGetLoweredNameE", (void **)&real_lowered, (void *)lowered},
      {"_ZN5pwgen17nvrtcGetCUBINSizeE", (void **)&real_sizes[CUBIN], (void *)size_CUBIN},
      {"_ZN5pwgen13nvrtcGetCUBINE", (void **)&real_reads[CUBIN], (void *)read_CUBIN},
      {"_ZN5pwgen15nvrtcGetPTXSizeE", (void **)&real_sizes[PTX], (void *)size_PTX},
      {"_ZN5pwgen11nvrtcGetPTXE", (void **)&real_reads[PTX], (void *)read_PTX},
      {"_ZN5pwgen22nvrtcGetProgramLogSizeE", (void **)&real_sizes[LOG], (void *)size_LOG},
      {"_ZN5pwgen18nvrtcGetProgramLogE", (void **)&real_reads[LOG], (void *)read_LOG},
  };
  int count = sizeof pointers / sizeof *pointers;
  void **places[16];
  for (int i = 0; i < count; i++) {
    places[i] = dlsym(handle, pointers[i].symbol);
    if (!places[i] || !*places[i]) return 2;
    *pointers[i].real = *places[i];
  }
  snprintf(folder, sizeof folder, "%s", cache);
  mkdir(folder, 0777);
  char path[sizeof folder + 40];
  snprintf(path, sizeof path, "%s/counts.%d", folder, (int)getpid());
  counts_file = open(path, O_CREAT | O_WRONLY | O_TRUNC, 0666);
  if (counts_file < 0) return 3;
  for (int i = 0; i < count; i++) { /* the linker left them read-only */
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)places[i] & ~(page - 1);
    if (mprotect((void *)start, page, PROT_READ | PROT_WRITE)) return 4;
    *places[i] = pointers[i].ours;
  }
  return 0;
}
