"""The system calls of containers, in Docker's form: calls that are not listed do not exist.

`python -m rollgym.sandbox.containers.seccomp` writes the profile that the `sandbox` service of compose.yaml
is started with.
"""

import json
import sys
from typing import Any

_FILES = """
    access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64
    fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock
    fremovexattr fsetxattr fstat fstatfs fsync ftruncate futimesat getcwd getdents getdents64 getxattr
    inotify_add_watch inotify_init inotify_init1 inotify_rm_watch ioctl lchown lgetxattr link linkat listxattr
    llistxattr lremovexattr lseek lsetxattr lstat mkdir mkdirat mknod mknodat newfstatat open openat openat2 pread64
    preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv removexattr rename renameat
    renameat2 rmdir sendfile setxattr splice stat statfs statx symlink symlinkat sync sync_file_range syncfs tee
    truncate umask unlink unlinkat utime utimensat utimes vmsplice write writev
"""
_MEMORY = """
    brk cachestat madvise mincore mlock mlock2 mlockall mmap mprotect mremap msync munlock munlockall munmap pkey_alloc
    pkey_free pkey_mprotect get_mempolicy
"""
_PROCESSES = """
    alarm arch_prctl capget execve execveat exit exit_group fork futex futex_waitv futex_wake futex_wait futex_requeue
    get_robust_list getcpu getegid geteuid getgid getgroups getitimer getpgid getpgrp getpid getppid getpriority
    getresgid getresuid getrlimit getrusage getsid gettid getuid getrandom kill landlock_add_rule
    landlock_create_ruleset landlock_restrict_self membarrier pause pidfd_open pidfd_send_signal prctl restart_syscall
    rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait
    rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam
    sched_getscheduler sched_rr_get_interval sched_yield seccomp set_robust_list set_tid_address setfsgid setfsuid
    setgid setgroups setitimer setpgid setregid setresgid setresuid setreuid setrlimit setsid setuid sigaltstack
    sysinfo tgkill times tkill uname vfork wait4 waitid
"""
_EVENTS_AND_TIME = """
    clock_getres clock_gettime clock_nanosleep epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait
    eventfd eventfd2 gettimeofday io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit nanosleep pipe
    pipe2 poll ppoll pselect6 select signalfd signalfd4 time timer_create timer_delete timer_getoverrun timer_gettime
    timer_settime timerfd_create timerfd_gettime timerfd_settime
"""
_SOCKETS = """
    accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg sendmmsg sendmsg
    sendto setsockopt shutdown socketpair
"""
# The additional calls of a server that makes namespaces for programs, which a filter of their own denies to these
# programs.
_NAMESPACES = """
    capset clone memfd_create mount mount_setattr pivot_root prlimit64 sched_setaffinity sched_setattr sched_setparam
    sched_setscheduler sethostname setpriority umount2 unshare
"""
# Allowed if these arguments are 0, which means the calling process: the process that starts programs has the same user,
# and would pass limits that it was given on to later programs.
_FOR_ITSELF = {
    "prlimit64": (0,),
    "sched_setaffinity": (0,),
    "sched_setattr": (0,),
    "sched_setparam": (0,),
    "sched_setscheduler": (0,),
    "setpriority": (0, 1),
}
_NAMESPACE_FLAGS = 0x7E020000
_ENOSYS = 38
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK, _NETLINK_ROUTE = 1, 2, 10, 16, 0

Rule = dict[str, Any]


def build_profile(*, namespaces: bool) -> dict[str, Any]:
    """Return a seccomp profile.

    Args:
        namespaces: Whether it is for a server that runs programs in namespaces which it makes itself, and not for
            the programs.
    """
    plain = "".join((_FILES, _MEMORY, _PROCESSES, _EVENTS_AND_TIME, _SOCKETS)).split()
    rules: list[Rule] = [
        _allow(*plain, *(_NAMESPACES.split() if namespaces else ())),
        # The C library takes `clone` instead, and the flags of that one can be seen.
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS},
        *(_allow("socket", (0, _EQUAL, family)) for family in (_AF_UNIX, _AF_INET, _AF_INET6)),
        # Queries of the network interfaces.
        _allow("socket", (0, _EQUAL, _AF_NETLINK), (2, _EQUAL, _NETLINK_ROUTE)),
    ]
    if not namespaces:
        rules.append(_allow("clone", (0, _MASKED, _NAMESPACE_FLAGS)))
        for name, arguments in _FOR_ITSELF.items():
            rules.append(_allow(name, *((argument, _EQUAL, 0) for argument in arguments)))
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        # Without the 32-bit calls of these machines.
        "archMap": [
            {"architecture": "SCMP_ARCH_X86_64", "subArchitectures": []},
            {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": []},
        ],
        "syscalls": rules,
    }


def profile_text(*, namespaces: bool) -> str:
    """Return the seccomp profile as JSON text."""
    return json.dumps(build_profile(namespaces=namespaces))


_EQUAL, _MASKED = "SCMP_CMP_EQ", "SCMP_CMP_MASKED_EQ"


def _allow(*parts: str | tuple[int, str, int]) -> Rule:
    """Allow calls, if their arguments are such; of those that are masked, no bit may be set."""
    rule: Rule = {
        "names": sorted(part for part in parts if isinstance(part, str)),
        "action": "SCMP_ACT_ALLOW",
    }
    arguments = [part for part in parts if isinstance(part, tuple)]
    if arguments:
        rule["args"] = [
            {"index": index, "op": comparison, "value": value, "valueTwo": 0}
            for index, comparison, value in arguments
        ]
    return rule


if __name__ == "__main__":
    json.dump(build_profile(namespaces=True), sys.stdout, indent=2)
    sys.stdout.write("\n")
