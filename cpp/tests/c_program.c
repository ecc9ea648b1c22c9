/* The C interface from a program in C: detrt-c BUNDLE IMAGE THREADS prints the line of the image, after that many threads on one detector
 * and on one each have found the same in the file and in its pixels, and had errors of their own. It needs no C++.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "detrt/detrt.h"

enum { runs = 3, most = 64 };

struct work {
  const char *bundle, *image, *expected;
  detrt_detector* shared; /* NULL: the thread opens one */
  int wrong;
};

static int fail(const char* what) {
  fprintf(stderr, "%s: %s\n", what, detrt_last_error());
  return 1;
}

static detrt_status open_one(const char* bundle, detrt_detector** detector) {
  detrt_options options;
  detrt_options_init(&options);
  options.threads = 1;
  options.trust_code = 1;
  return detrt_open(bundle, &options, detector);
}

/* The line of the image, which is freed with free; NULL after an error. */
static char* line_of(detrt_detector* detector, const char* image) {
  detrt_result* result = NULL;
  char* line = NULL;
  if (detrt_detect_file(detector, image, &result) != DETRT_OK)
    return NULL;
  line = malloc(strlen(detrt_json(result)) + 1);
  if (line != NULL)
    strcpy(line, detrt_json(result));
  detrt_free(result);
  return line;
}

static void* find(void* argument) {
  struct work* work = argument;
  detrt_detector* detector = work->shared;
  const uint8_t pixels[2 * 2 * 3] = {0};
  int run = 0;
  if (detector == NULL && open_one(work->bundle, &detector) != DETRT_OK) {
    work->wrong = fail("open");
    return NULL;
  }
  for (run = 0; run < runs; ++run) {
    detrt_result* result = NULL;
    char* line = line_of(detector, work->image);
    work->wrong += line == NULL || strcmp(line, work->expected) != 0;
    free(line);
    work->wrong += detrt_detect_file(detector, "/none.jpg", &result) != DETRT_BAD_INPUT || result != NULL;
    work->wrong += strstr(detrt_last_error(), "/none.jpg") == NULL;
    work->wrong += detrt_detect_rgb(detector, pixels, 2, 2, 0, &result) != DETRT_OK || *detrt_last_error() != '\0';
    work->wrong += detrt_get(result, detrt_count(result)).score != 0;
    detrt_free(result);
  }
  if (work->shared == NULL)
    detrt_close(detector);
  return NULL;
}

int main(int count, char** arguments) {
  const int threads = count == 4 ? atoi(arguments[3]) : 0;
  detrt_detector* detector = NULL;
  char* expected = NULL;
  int shared = 0, i = 0, wrong = 0;
  if (threads < 1 || threads > most) {
    fprintf(stderr, "detrt-c BUNDLE IMAGE THREADS (1 to %d)\n", most);
    return 2;
  }
  if (open_one("/none", &detector) != DETRT_BAD_INPUT || detector != NULL || *detrt_last_error() == '\0')
    return fail("a bundle that does not exist");
  if (open_one(arguments[1], &detector) != DETRT_OK)
    return fail("open");
  expected = line_of(detector, arguments[2]);
  if (expected == NULL)
    return fail("detect");
  for (shared = 0; shared < 2; ++shared) {
    pthread_t started[most];
    struct work work[most];
    for (i = 0; i < threads; ++i) {
      work[i].bundle = arguments[1];
      work[i].image = arguments[2];
      work[i].expected = expected;
      work[i].shared = shared ? detector : NULL;
      work[i].wrong = 0;
      if (pthread_create(&started[i], NULL, find, &work[i]) != 0)
        return fail("pthread_create");
    }
    for (i = 0; i < threads; ++i) {
      pthread_join(started[i], NULL);
      wrong += work[i].wrong;
    }
  }
  puts(expected);
  free(expected);
  detrt_close(detector);
  return wrong == 0 ? 0 : fail("threads found something else");
}
