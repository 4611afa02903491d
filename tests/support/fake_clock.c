// Gives the process that it is preloaded into (LD_PRELOAD) another wall clock, another answer of adjtimex and another
// boot: see fake_clock.py, which writes the file that SLUICE_FAKE_CLOCK names, also while the process runs.
//
// CLOCK_MONOTONIC stays as it is: nothing that outlives a process may rest on it.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/timex.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S 1000000000LL
#define BOOT_ID "/proc/sys/kernel/random/boot_id"
#define LOOK_NS 5000000L

// As `Control` of fake_clock.py. Each field is written at once.
struct control {
  _Atomic int64_t wall_ns;      // what the wall clock is ahead of the real one
  _Atomic int64_t boot_ns;      // CLOCK_BOOTTIME, as it really is, at the start of the box
  _Atomic int64_t maxerror_us;
  _Atomic int32_t state;        // what adjtimex returns
  _Atomic int32_t status;       // STA_...
  _Atomic uint32_t steps;       // how often the wall clock was set
};

static const struct control real;
static const struct control *control = &real;
static char boot_id[4096] = BOOT_ID;

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void open_control(void) {
  const char *path = getenv("SLUICE_FAKE_CLOCK");
  if (path == NULL) return;
  int fd = NEXT(open)(path, O_RDONLY | O_CLOEXEC);
  void *mapped = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof(struct control), PROT_READ, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) {
    fprintf(stderr, "fake_clock: %s cannot be read\n", path);
    abort();
  }
  close(fd);
  snprintf(boot_id, sizeof boot_id, "%s.boot_id", path);
  control = mapped;
}

// -- reading clocks -------------------------------------------------------------------------------

static int64_t ahead_ns(clockid_t clock) {
  switch (clock) {
    case CLOCK_REALTIME:
    case CLOCK_REALTIME_COARSE:
    case CLOCK_REALTIME_ALARM:
    case CLOCK_TAI:
      return control->wall_ns;
    case CLOCK_BOOTTIME:
    case CLOCK_BOOTTIME_ALARM:
      return -control->boot_ns;
    default:
      return 0;
  }
}

static void add(struct timespec *at, int64_t ns) {
  at->tv_sec += ns / NS_PER_S;
  at->tv_nsec += ns % NS_PER_S;
  if (at->tv_nsec < 0) {
    at->tv_nsec += NS_PER_S;
    at->tv_sec -= 1;
  } else if (at->tv_nsec >= NS_PER_S) {
    at->tv_nsec -= NS_PER_S;
    at->tv_sec += 1;
  }
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*next)(clockid_t, struct timespec *);
  if (next == NULL) next = NEXT(clock_gettime);
  int result = next(clock, now);
  if (result == 0) add(now, ahead_ns(clock));
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  (void)zone;
  struct timespec at;
  clock_gettime(CLOCK_REALTIME, &at);
  now->tv_sec = at.tv_sec;
  now->tv_usec = at.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *now) {
  struct timespec at;
  clock_gettime(CLOCK_REALTIME, &at);
  if (now != NULL) *now = at.tv_sec;
  return at.tv_sec;
}

// -- what the kernel says of the clock ------------------------------------------------------------

int adjtimex(struct timex *told) {
  if (told->modes != 0) {
    errno = EPERM;
    return -1;
  }
  memset(told, 0, sizeof *told);
  told->maxerror = told->esterror = control->maxerror_us;
  told->status = control->status;
  told->tick = 10000;
  gettimeofday(&told->time, NULL);
  return control->state;
}

int ntp_adjtime(struct timex *told) { return adjtimex(told); }

int clock_adjtime(clockid_t clock, struct timex *told) {
  if (clock == CLOCK_REALTIME) return adjtimex(told);
  errno = EINVAL;
  return -1;
}

// -- timers that end when the wall clock is set (timerfd_create(2)) -------------------------------

#define TIMERS_MAX 8
static struct {
  int fd;  // 0: none
  uint32_t steps;
  int is_cancelled;
} timers[TIMERS_MAX];
static pthread_mutex_t timers_lock = PTHREAD_MUTEX_INITIALIZER;

// Wakes whoever waits for such a timer, by poll too: has it end at once.
static void *watch_steps(void *unused) {
  (void)unused;
  int (*next)(int, int, const struct itimerspec *, struct itimerspec *) = NEXT(timerfd_settime);
  const struct timespec pause = {0, LOOK_NS};
  const struct itimerspec at_once = {{0, 0}, {0, 1}};
  for (;;) {
    nanosleep(&pause, NULL);
    pthread_mutex_lock(&timers_lock);
    for (int i = 0; i < TIMERS_MAX; i++) {
      if (timers[i].fd == 0 || timers[i].steps == control->steps) continue;
      timers[i].steps = control->steps;
      timers[i].is_cancelled = 1;
      next(timers[i].fd, 0, &at_once, NULL);
    }
    pthread_mutex_unlock(&timers_lock);
  }
  return NULL;
}

static void begin_to_watch(void) {
  sigset_t all, before;
  pthread_t thread;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  if (pthread_create(&thread, NULL, watch_steps, NULL) != 0) abort();
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

int timerfd_settime(int fd, int flags, const struct itimerspec *wanted, struct itimerspec *former) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  struct itimerspec given = *wanted;
  if (control != &real && flags & TFD_TIMER_CANCEL_ON_SET) {
    pthread_once(&once, begin_to_watch);
    pthread_mutex_lock(&timers_lock);
    int place = -1;
    for (int i = 0; i < TIMERS_MAX; i++) {
      if (timers[i].fd == fd || (place < 0 && timers[i].fd == 0)) place = i;
      if (timers[i].fd == fd) break;
    }
    if (place < 0) abort();
    timers[place].fd = fd;
    timers[place].steps = control->steps;
    timers[place].is_cancelled = 0;
    pthread_mutex_unlock(&timers_lock);
    flags &= ~TFD_TIMER_CANCEL_ON_SET;
    // Far beyond what the clock can be set to, it means never.
    if (flags & TFD_TIMER_ABSTIME && (given.it_value.tv_sec != 0 || given.it_value.tv_nsec != 0) &&
        given.it_value.tv_sec < 1LL << 40) {
      add(&given.it_value, -control->wall_ns);
      if (given.it_value.tv_sec < 0) given.it_value = (struct timespec){0, 1};
    }
  }
  return NEXT(timerfd_settime)(fd, flags, &given, former);
}

ssize_t read(int fd, void *into, size_t size) {
  static ssize_t (*next)(int, void *, size_t);
  if (next == NULL) next = NEXT(read);
  ssize_t result = next(fd, into, size);
  if (result != sizeof(uint64_t)) return result;
  pthread_mutex_lock(&timers_lock);
  for (int i = 0; i < TIMERS_MAX; i++) {
    if (fd == 0 || timers[i].fd != fd || !timers[i].is_cancelled) continue;
    timers[i].is_cancelled = 0;
    errno = ECANCELED;
    result = -1;
  }
  pthread_mutex_unlock(&timers_lock);
  return result;
}

int close(int fd) {
  static int (*next)(int);
  if (next == NULL) next = NEXT(close);
  if (fd != 0) {
    pthread_mutex_lock(&timers_lock);
    for (int i = 0; i < TIMERS_MAX; i++) {
      if (timers[i].fd == fd) timers[i].fd = 0;
    }
    pthread_mutex_unlock(&timers_lock);
  }
  return next(fd);
}

// -- the boot's name ------------------------------------------------------------------------------

static const char *place_of(const char *path) { return strcmp(path, BOOT_ID) == 0 ? boot_id : path; }

#define MODE(last)                              \
  mode_t mode = 0;                              \
  if (last & (O_CREAT | __O_TMPFILE)) {         \
    va_list more;                               \
    va_start(more, last);                       \
    mode = va_arg(more, mode_t);                \
    va_end(more);                               \
  }

int open(const char *path, int flags, ...) {
  MODE(flags)
  return NEXT(open)(place_of(path), flags, mode);
}

int open64(const char *path, int flags, ...) {
  MODE(flags)
  return NEXT(open64)(place_of(path), flags, mode);
}

int openat(int folder, const char *path, int flags, ...) {
  MODE(flags)
  return NEXT(openat)(folder, place_of(path), flags, mode);
}

int openat64(int folder, const char *path, int flags, ...) {
  MODE(flags)
  return NEXT(openat64)(folder, place_of(path), flags, mode);
}

FILE *fopen(const char *path, const char *mode) { return NEXT(fopen)(place_of(path), mode); }

FILE *fopen64(const char *path, const char *mode) { return NEXT(fopen64)(place_of(path), mode); }
