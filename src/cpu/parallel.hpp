// Threads of the CPU backend. parallel.cpp is the only file that knows OpenMP: it uses the run time already in the
// process (so that a torch process is not oversubscribed), else the system's, else a small pool of its own. So do all
// threads that call but the first, and forked children.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace tilewise::cpu {

// Upper bound of threads that work for the calling thread at once, >= 1: the host's setting, else torch's or OpenMP's
// number, within affinity and cgroup quota. 1 where a team of OpenMP calls, as from inside torch's parallel loops.
int max_threads();
void set_num_threads(int count);  // 0 = follow the run time
void set_executor(void (*function)(void* user, int64_t count, int32_t num_threads,
                                   void (*body)(void* context, int64_t index), void* context),
                  void* user, int32_t num_threads);  // nullptr restores

// Calls body(index, slot) once for every index in [0, count), handed out dynamically in ascending order. slot is less
// than what max_threads() said to this thread last, whatever has been set since, and no two calls that run at the same
// time share one: it selects per-thread scratch. The first exception is rethrown after all threads are done. Nested
// calls run serially.
void parallel_for(int64_t count, const std::function<void(int64_t index, int slot)>& body);

// Path of the OpenMP run time, or what works instead.
const char* executor_name();

// CPUs that the quotas of this process's cgroups (version 1 or 2) pay for, rounded up; 0: no quota. root: for tests.
int cgroup_quota(const std::string& root = "");

}  // namespace tilewise::cpu
