"""The attacks that try to reach what is outside: files, secrets, the network, the kernel. See `attacks`."""

from __future__ import annotations

from tests.sandbox.attacks import _ANY, USE, Attack

FILES = [
    Attack("read the owner's secret", 'attempt("secret", read, CTX["secret"])', plain=True),
    Attack(
        "list the owner's folder", 'attempt("folder", os.listdir, os.path.dirname(CTX["secret"]))', plain=True
    ),
    Attack(
        "read through /proc",
        """
for pid in [p for p in os.listdir("/proc") if p.isdigit()] + ["self", "thread-self"]:
    for way in ("root", "cwd"):
        attempt(pid + way, read, f"/proc/{pid}/{way}/" + "../" * 20 + CTX["secret"])
""",
        plain=True,
    ),
    Attack(
        "read a symlink to the secret",
        """
os.symlink(CTX["secret"], "/tmp/l" + CTX["left"])
attempt("link", read, "/tmp/l" + CTX["left"])
""",
    ),
    Attack(
        "read private system files",
        """
for path in (
    "/etc/shadow",
    os.path.expanduser("~root/.bashrc"),
    os.path.expanduser("~root/.profile"),
    os.path.expanduser("~root/.ssh"),
    "/home",
    "/proc/kcore",
    "/var/lib",
    "/run/secrets",
    "/sys/firmware",
    "/etc/ssh",
    "/boot",
    "/proc/kallsyms_x",
    "/var/run/docker.sock",
    "/mnt",
    "/srv",
    "/opt",
):
    try:
        found = os.listdir(path) if os.path.isdir(path) else read(path)
    except OSError:
        continue
    if found:
        escaped(path)
""",
    ),
    Attack(
        "write the system",
        """
for path in (
    "/usr/x",
    "/usr/bin/x",
    "/etc/x",
    "/x",
    "/lib/x",
    "/dev/x",
    "/run/x",
    "/var/x",
    "/home/x",
    os.path.expanduser("~root/x"),
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/hostname",
    "/proc/sysrq-trigger",
    "/sys/x",
    "/etc/passwd",
    "/etc/hosts",
    "/etc/ld.so.preload",
    "/usr/lib/x",
    "/bin/sh",
    sys.executable,
    os.__file__,
):
    attempt(path, append, path)
""",
    ),
    Attack(
        "make the system writable",
        'attempt("remount", lambda: syscall("mount", b"none", b"/usr", None, 32 | 4096, None))',
    ),
    Attack(
        "delete the system",
        """
attempt("unlink", os.unlink, os.__file__)
attempt("rename", os.rename, "/usr", "/tmp/usr")
""",
    ),
    Attack(
        "change modes of the system",
        """
attempt("chmod", os.chmod, "/usr/bin", 0o777)
attempt("chown", os.chown, "/etc/passwd", 1000, 1000)
""",
    ),
    Attack(
        "devices of the machine",
        """
for name in (
    "vda",
    "sda",
    "nvme0n1",
    "mem",
    "kmsg",
    "kvm",
    "fuse",
    "port",
    "nvidia0",
    "net/tun",
    "tty",
    "console",
    "vsock",
    "loop-control",
    "ptmx",
    "mapper/control",
):
    attempt(name, os.open, "/dev/" + name, os.O_RDWR)
""",
    ),
    Attack(
        "make a device", 'attempt("mknod", os.mknod, "/tmp/disk", stat.S_IFBLK | 0o600, os.makedev(254, 0))'
    ),
    Attack(
        "open by handle",
        'attempt("handle", lambda: syscall("open_by_handle_at", -100, (ctypes.c_char * 64)(), 0))',
    ),
    Attack(
        "programs that gain rights",
        """
os.path.exists("/bin/su") and attempt(
    "su", lambda: subprocess.run(["su", "-c", "id"], check=True, timeout=3, stdin=subprocess.DEVNULL)
)
""",
    ),
    Attack(
        "set-user bit",
        """
open("s", "w").close()
os.chmod("s", 0o4755)
"NoNewPrivs:\\t1" in open("/proc/self/status").read() or escaped("may gain rights")
""",
        plain=True,
    ),
    Attack(
        "control groups",
        """
for folder in ("/sys/fs/cgroup", "/cgroup"):
    attempt(folder, os.mkdir, folder + "/x")
""",
    ),
]

SECRETS = [
    Attack(
        "inherited environment", 'CTX["value"] in repr(dict(os.environ)) and escaped("environ")', plain=True
    ),
    Attack(
        "environments in /proc",
        """
for name in os.listdir("/proc"):
    if name.isdigit():
        try:
            CTX["value"].encode() in read(f"/proc/{name}/environ", 1 << 20) and escaped(name)
        except OSError:
            pass
""",
        plain=True,
    ),
    Attack(
        "inherited descriptors",
        """
for name in os.listdir("/proc/self/fd"):
    try:
        kind = os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        continue
    if int(name) > 2 and kind != f"/proc/{os.getpid()}/fd":
        escaped(name, kind)
""",
        plain=True,
    ),
    Attack(
        "descriptors of others",
        """
for pid in [p for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]:
    attempt(pid, lambda: [os.open(f"/proc/{pid}/fd/{n}", 0) for n in os.listdir(f"/proc/{pid}/fd")])
""",
    ),
    Attack(
        "memory of others",
        """
for pid in [p for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]:
    attempt(pid, append, f"/proc/{pid}/mem")
""",
    ),
    Attack(
        "trace its parent",
        """
attempt("ptrace", lambda: syscall("ptrace", 16, os.getppid(), 0, 0))
attempt("seize", lambda: syscall("ptrace", 0x4206, 1, 0, 0))
""",
    ),
    Attack(
        "read its parent's memory",
        """
b = (ctypes.c_char * 64)()
v = (ctypes.c_size_t * 2)(ctypes.addressof(b), 64)
attempt("vm", lambda: syscall("process_vm_readv", os.getppid(), v, 1, v, 1, 0))
""",
    ),
    Attack(
        "take its parent's descriptors",
        'attempt("getfd", lambda: syscall("pidfd_getfd", os.pidfd_open(os.getppid()), 0, 0))',
    ),
    Attack(
        "kernel messages", 'attempt("syslog", lambda: syscall("syslog", 3, (ctypes.c_char * 4096)(), 4096))'
    ),
]

NETWORK = [
    Attack(
        "connect to the machine",
        'attempt("tcp", socket.create_connection, ("127.0.0.1", CTX["port"]), 2)',
        plain=True,
    ),
    Attack("connect over IPv6", 'attempt("tcp6", socket.create_connection, ("::1", CTX["port"]), 2)'),
    Attack(
        "connect outside",
        """
for address in ("1.1.1.1", "8.8.8.8", "169.254.169.254", "10.0.0.1"):
    attempt(address, socket.create_connection, (address, 80), 0.3)
""",
    ),
    Attack(
        "send datagrams outside",
        """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
attempt("udp", s.sendto, b"x", ("8.8.8.8", 53))
""",
    ),
    Attack("resolve a name", 'attempt("dns", socket.getaddrinfo, "example.com", 80)'),
    Attack(
        "abstract socket of the machine",
        """
s = socket.socket(socket.AF_UNIX)
attempt("abstract", s.connect, "\\0" + CTX["abstract"])
""",
        plain=True,
    ),
    Attack(
        "raw and packet sockets",
        """
attempt("raw", socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)
attempt("packet", socket.socket, socket.AF_PACKET, socket.SOCK_RAW, 3)
""",
    ),
    Attack("netlink", 'attempt("netlink", socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 0)', plain=True),
    Attack("hypervisor sockets", 'attempt("vsock", socket.socket, socket.AF_VSOCK, socket.SOCK_STREAM)'),
    Attack("kernel crypto sockets", 'attempt("alg", socket.socket, socket.AF_ALG, socket.SOCK_SEQPACKET)'),
    Attack("interfaces of the machine", '[escaped(n) for _, n in socket.if_nameindex() if n != "lo"]'),
]

KERNEL = [
    Attack(
        "capabilities",
        """
for line in open("/proc/self/status"):
    name, _, value = line.partition(":")
    if name in ("CapEff", "CapPrm", "CapInh", "CapAmb", "CapBnd") and int(value, 16):
        escaped(line)
""",
    ),
    Attack(
        "no filter", '"Seccomp:\\t2" in open("/proc/self/status").read() or escaped("no seccomp")', plain=True
    ),
    Attack(
        "become root",
        """
attempt("setuid", os.setuid, 0)
attempt("setgid", os.setgid, 0)
attempt("groups", os.setgroups, [0])
os.geteuid() == 0 and escaped("root")
""",
    ),
    Attack("map users", 'attempt("uid_map", os.write, os.open("/proc/self/uid_map", 1), b"0 0 1")'),
    Attack("new user namespace", 'attempt("unshare", lambda: check(libc.unshare(NEWUSER)))'),
    Attack(
        "other new namespaces",
        """
for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x20000000, 0x40000000, 0x80):
    attempt(hex(flag), lambda: check(libc.unshare(flag)))
""",
    ),
    Attack(
        "clone into a new user namespace",
        """
pid = attempt("clone", lambda: syscall("clone", NEWUSER | 17, 0, 0, 0, 0))
pid == 0 and os._exit(0)
""",
    ),
    Attack(
        "clone3 into a new user namespace",
        """
a = (ctypes.c_ulonglong * 8)(NEWUSER, 0, 0, 0, 17)
pid = attempt("clone3", lambda: syscall("clone3", a, 64))
pid == 0 and os._exit(0)
""",
    ),
    Attack(
        "join namespaces",
        """
for name in os.listdir("/proc/1/ns"):
    attempt(name, lambda: syscall("setns", os.open("/proc/1/ns/" + name, 0), 0))
""",
    ),
    Attack(
        "nested bubblewrap",
        """
attempt(
    "unshare",
    lambda: subprocess.run(["unshare", "-Ur", "true"], check=True, capture_output=True, timeout=5),
)
""",
    ),
    Attack(
        "mount",
        """
attempt("tmpfs", lambda: syscall("mount", b"none", b"/tmp", b"tmpfs", 0, None))
attempt("bind", lambda: syscall("mount", b"/", b"/tmp", None, 4096, None))
""",
    ),
    Attack(
        "unmount",
        """
for path in (b"/proc", b"/tmp", b"/dev", b"/usr"):
    attempt(path, lambda: syscall("umount2", path, 2))
""",
    ),
    Attack(
        "mount anew",
        """
attempt("fsopen", lambda: syscall("fsopen", b"tmpfs", 0))
attempt("open_tree", lambda: syscall("open_tree", -100, b"/", 1))
""",
    ),
    Attack(
        "change root",
        """
attempt("chroot", os.chroot, "/tmp")
attempt("pivot", lambda: syscall("pivot_root", b"/tmp", b"/tmp"))
""",
    ),
    Attack(
        "kernel keys",
        """
attempt("keyctl", lambda: syscall("keyctl", 0, -3, 1))
attempt("add", lambda: syscall("add_key", b"user", b"x", b"y", 1, -3))
""",
    ),
    Attack(
        "kernel programs",
        'attempt("bpf", lambda: syscall("bpf", 0, (ctypes.c_char * 128)(0, 0, 0, 0, 2), 128))',
    ),
    Attack(
        "performance events",
        'attempt("perf", lambda: syscall("perf_event_open", (ctypes.c_char * 128)(), 0, -1, -1, 0))',
    ),
    Attack("page faults", 'attempt("userfaultfd", lambda: syscall("userfaultfd", 1))'),
    Attack(
        "asynchronous rings",
        'attempt("io_uring", lambda: syscall("io_uring_setup", 8, (ctypes.c_char * 120)()))',
    ),
    Attack(
        "kernel modules",
        """
attempt("init", lambda: syscall("init_module", b"", 0, b""))
attempt("kexec", lambda: syscall("kexec_load", 0, 0, None, 0))
""",
    ),
    Attack("the clock", 'attempt("clock", time.clock_settime, time.CLOCK_REALTIME, time.time())'),
    Attack("the name", 'attempt("name", socket.sethostname, "owned")'),
    Attack(
        "type into a terminal",
        """
for fd in (0, 1, 2):
    attempt(fd, fcntl.ioctl, fd, 0x5412, b"x")
attempt("tty", os.open, "/dev/tty", os.O_RDWR)
""",
    ),
    Attack(
        "calls of another kind",
        'attempt("x32", lambda: syscall("x32")) if CTX["machine"] == "x86_64" else None',
        causes=_ANY,
    ),
    Attack("crash", "ctypes.string_at(0)", causes=frozenset({"killed"})),
]

ATTACKS = [*USE, *FILES, *SECRETS, *NETWORK, *KERNEL]
