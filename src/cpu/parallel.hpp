// Threads of the CPU backend. parallel.cpp is the only file that knows OpenMP: it uses the run time already in the
// process (so that a torch process is not oversubscribed), else the system's, else a small pool of its own.
#pragma once

#include <cstdint>
#include <functional>

namespace tilewise::cpu {

// Upper bound of threads that work at once, >= 1: host's setting, else OpenMP's, within affinity and cgroup quota.
int max_threads();
void set_num_threads(int count);  // 0 = follow the run time
void set_executor(void (*function)(void* user, int64_t count, int32_t num_threads,
                                   void (*body)(void* context, int64_t index), void* context),
                  void* user, int32_t num_threads);  // nullptr restores

// Calls body(index, slot) once for every index in [0, count), handed out dynamically in ascending order. slot is in
// [0, max_threads()) and no two calls that run at the same time share one: it selects per-thread scratch. The first
// exception is rethrown after all threads are done. Nested calls run serially.
void parallel_for(int64_t count, const std::function<void(int64_t index, int slot)>& body);

// "OpenMP run time of the process (libgomp), 2 threads" and the like.
const char* executor_name();

}  // namespace tilewise::cpu
