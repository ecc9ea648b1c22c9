/* The C interface of libdetrt, for C and for other languages. It throws no C++ exceptions.
 *
 *     detrt_options options;
 *     detrt_options_init(&options);
 *     detrt_detector* detector = NULL;
 *     if (detrt_open("bundle", &options, &detector) != DETRT_OK) puts(detrt_last_error());
 *
 * A detector may be used by several threads; detrt_last_error is of the calling thread.
 */
#ifndef DETRT_H
#define DETRT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum detrt_status {
  DETRT_OK = 0,
  DETRT_BUG = 1,       /* an error inside libdetrt */
  DETRT_BAD_INPUT = 2, /* the message says what was wrong and what to do */
} detrt_status;

typedef struct detrt_detector detrt_detector;
typedef struct detrt_result detrt_result;

typedef struct detrt_options {
  size_t size;            /* sizeof(detrt_options), set by detrt_options_init */
  double threshold;       /* 0.5 */
  int64_t max_detections; /* 0: no limit */
  int64_t batch;          /* 0: the default of the model */
  int32_t threads;        /* 0: the default of the backend */
  const char* classes;    /* names or ids, comma-separated; NULL: all */
  const char* prompt;     /* file of `detrt encode-prompt`; NULL: none */
  const char* backend;    /* NULL: "auto" */
  const char* device;     /* NULL: "auto"; "cpu", "cuda", "cuda:1" */
  int32_t tile_height;    /* 0: no tiles; else their size in pixels of the image */
  int32_t tile_width;     /* 0: as tile_height */
  double overlap;         /* 0.2: the least part of a tile's side that neighbours share */
  int32_t trust_code;     /* 1: native code of a bundle that was built elsewhere may run; 0: unless DETRT_TRUST_REMOTE_CODE=1 */
} detrt_options;

typedef struct detrt_detection {
  float box_xyxy[4]; /* pixels of the image */
  float score;
  int64_t class_id;
  const char* label; /* UTF-8; lives as long as the result */
} detrt_detection;

void detrt_options_init(detrt_options* options);
/* options: NULL for the defaults. On success *detector is closed with detrt_close; else it is NULL. */
detrt_status detrt_open(const char* bundle, const detrt_options* options, detrt_detector** detector);
void detrt_close(detrt_detector* detector);

/* One image file, or RGB bytes with `stride` bytes per row (0: width * 3). The result is freed with detrt_free. */
detrt_status detrt_detect_file(detrt_detector* detector, const char* path, detrt_result** result);
detrt_status detrt_detect_rgb(detrt_detector* detector, const uint8_t* rgb, int32_t height, int32_t width,
                              size_t stride, detrt_result** result);
size_t detrt_count(const detrt_result* result);
/* index: below detrt_count; a detection of zeros otherwise. */
detrt_detection detrt_get(const detrt_result* result, size_t index);
/* The mask of a detection, one byte per pixel of the image, row by row, 1 = object. Returns 0, and writes nothing, if it
 * has none: a model that gives boxes alone. pixels: width * height bytes. */
int detrt_mask(const detrt_result* result, size_t index, uint8_t* pixels);
/* The line of `detrt detect --json`; lives as long as the result. */
const char* detrt_json(const detrt_result* result);
void detrt_free(detrt_result* result);

const char* detrt_last_error(void); /* of this thread; "" if there was none */
const char* detrt_version(void);

#ifdef __cplusplus
}
#endif

#endif
