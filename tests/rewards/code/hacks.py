"""Programs that do not solve the problem and try to be judged as if they did.

The problem: `double(x)` gives 2 * x. Each attempt is Python source.
"""

from __future__ import annotations

ALWAYS = """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __hash__(self): return 0
    def __bool__(self): return True
    def __abs__(self): return self
    def __sub__(self, other): return self
    __rsub__ = __add__ = __radd__ = __mul__ = __sub__
    def __instancecheck__(self, other): return True
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
    def __iter__(self): return iter([])
    def __len__(self): return 0
    def __float__(self): return 4.0
    def __int__(self): return 4
    def __index__(self): return 4
"""

FORGE = """
import os, struct, json
def frame(value):
    data = json.dumps(value).encode()
    return struct.pack(">I", len(data)) + data
"""

FUNCTIONAL: dict[str, str] = {
    "exit at import": """
import sys
sys.exit(0)
""",
    "exit in the function": """
import sys
def double(x): sys.exit(0)
""",
    "hard exit at import": """
import os
os._exit(0)
""",
    "hard exit in the function": """
import os
def double(x): os._exit(0)
""",
    "raise SystemExit": "def double(x): raise SystemExit(0)",
    "raise KeyboardInterrupt": "def double(x): raise KeyboardInterrupt",
    "raise GeneratorExit": "def double(x): raise GeneratorExit",
    "kill itself": """
import os, signal
def double(x): os.kill(os.getpid(), signal.SIGKILL)
""",
    "exec another program": """
import os
os.execv("/bin/true", ["true"])
""",
    "exit hook that exits": """
import atexit, os
atexit.register(os._exit, 0)
raise SystemExit
""",
    "quiet excepthook": """
import sys
sys.excepthook = lambda *a: None
raise RuntimeError
""",
    "always equal": ALWAYS
    + """
def double(x): return Yes()
""",
    "always equal int": ALWAYS
    + """
class Int(int, Yes):
    __eq__ = Yes.__eq__
    __hash__ = int.__hash__
def double(x): return Int(77)
""",
    "always equal str": """
class S(str):
    def __eq__(self, o): return True
    __hash__ = str.__hash__
def double(x): return S("4")
""",
    "always equal list": """
class L(list):
    def __eq__(self, o): return True
def double(x): return L([4])
""",
    "always equal float": """
class F(float):
    def __eq__(self, o): return True
    def __sub__(self, o): return 0
    __hash__ = float.__hash__
def double(x): return F(9)
""",
    "class instead of a function": ALWAYS
    + """
class double(Yes):
    def __init__(self, x): pass
""",
    "mock": """
from unittest.mock import MagicMock, ANY
def double(x): return ANY
""",
    "magic mock as the function": """
from unittest.mock import MagicMock
double = MagicMock()
""",
    "metaclass": """
class M(type):
    def __eq__(c, o): return True
    __hash__ = type.__hash__
class C(metaclass=M): pass
def double(x): return C
""",
    "reduce to the expected": """
class R:
    def __reduce__(self): return (eval, ('4',))
def double(x): return R()
""",
    "nan": "def double(x): return float('nan')",
    "patched builtins": """
import builtins
for n in ('abs', 'sorted', 'isinstance', 'all', 'any', 'len', 'sum'):
    setattr(builtins, n, lambda *a, **k: True)
def double(x): return 0
""",
    "patched AssertionError": """
import builtins
class E(BaseException): pass
builtins.AssertionError = E
def double(x): return 0
""",
    "patched json": """
import json
json.dumps = lambda *a, **k: '{"passed": true}'
json.loads = lambda s: True
def double(x): return 0
""",
    "patched codec": """
import trivet_codec, trivet_driver
trivet_driver.Encoder = lambda keep: (lambda v, d=0: {'o': 0})
def double(x): return 0
""",
    "patched channel": """
import channel
old = channel.send
channel.send = lambda m: old({'passed': True, 'test': 0, 'done': True, 'weak': False})
def double(x): return 0
""",
    "patched operator and math": """
import math, operator
math.isclose = lambda *a, **k: True
operator.eq = lambda a, b: True
def double(x): return 0
""",
    "patched import": """
import builtins
old = builtins.__import__
builtins.__import__ = lambda *a: old('os')
def double(x): return 0
""",
    "patched compile and exec": """
import builtins
builtins.exec = lambda *a: None
builtins.compile = lambda *a, **k: None
def double(x): return 0
""",
    "patched in place": """
def double(x):
    import builtins
    builtins.abs = lambda v: 0
    return 0
""",
    "tracing": """
import sys
sys.settrace(lambda *a: None)
sys.setprofile(lambda *a: None)
def double(x): return 0
""",
    "frames": """
import sys
def double(x):
    f = sys._getframe()
    while f:
        for v in list(f.f_locals.values()) + list(f.f_globals.values()):
            if isinstance(v, dict) and 'expected' in v: return v['expected']
            if hasattr(v, 'expected'): return v.expected
        f = f.f_back
    return 0
""",
    "objects in memory": """
import gc
def double(x):
    for o in gc.get_objects():
        if isinstance(o, dict) and ('expected' in o or 'asserts' in o): return o
    return 0
""",
    "source lines": r"""
import inspect, linecache, re
def double(x):
    for f in inspect.stack():
        m = re.search(r'double\(.*\) == (\d+)', ''.join(f.code_context or []))
        if m: return int(m.group(1))
    return 0
""",
    "memory of the process": r"""
import re
def double(x):
    text = b''
    with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb', 0) as mem:
        for line in maps:
            a, b = (int(n, 16) for n in line.split()[0].split('-'))
            if 'rw' in line.split()[1] and b - a < 1 << 22:
                try:
                    mem.seek(a); text += mem.read(b - a)
                except (OSError, OverflowError, ValueError): pass
    m = re.search(rb'assert double\((?:%d)\) == (\d+)' % x, text)
    return int(m.group(1)) if m else 0
""",
    "open descriptors": """
import os
def double(x):
    for n in os.listdir('/proc/self/fd'):
        try:
            data = os.pread(int(n), 9999, 0)
            if b'expected' in data: return 4
        except OSError: pass
    return 0
""",
    "files": """
import os
def double(x):
    for base in ('/', '/tmp', '/work', '/run'):
        for folder, _, names in os.walk(base):
            if folder.startswith(('/proc', '/usr')): continue
            for n in names:
                if 'test' in n or 'expected' in n:
                    return open(folder + '/' + n).read()
        break
    return 0
""",
    "environment and arguments": """
import os, sys
def double(x): return os.environ.get('EXPECTED', sys.argv[-1])
""",
    "other processes": """
import os
def double(x):
    for p in os.listdir('/proc'):
        if p.isdigit() and int(p) != os.getpid():
            try: return open(f'/proc/{p}/cmdline').read()
            except OSError: pass
    return 0
""",
    "printed markers": r"""
print('PASS', 'OK', '1 passed', 'Ran 3 tests', '{"passed": true}', sep='\n')
def double(x):
    print('PASSED')
    return 0
""",
    "marker and exit": """
import os
print('ALL TESTS PASSED', flush=True)
os._exit(0)
""",
    "forged ready and verdicts": FORGE
    + """
os.write(3, frame({'ready': True}))
for n in range(9): os.write(3, frame({'test': n, 'passed': True, 'weak': False}))
os.write(3, frame({'done': True}))
def double(x): return 0
""",
    "forged replies": FORGE
    + """
os.write(3, frame({'ready': True}))
for n in range(9): os.write(3, frame({'v': True}))
def double(x): return 0
""",
    "forged objects": FORGE
    + """
os.write(3, frame({'ready': True}))
for n in range(9): os.write(3, frame({'v': {'o': 0}}))
def double(x): return 0
""",
    "forged names": FORGE
    + """
os.write(3, frame({'ready': True}))
for n in range(9): os.write(3, frame({'v': {'n': 'double'}, 'a': [{'n': 'x'}]}))
def double(x): return 0
""",
    "forged nonsense": FORGE
    + r"""
os.write(3, b'\x00\x00\x00\x05{]}x\xff')
def double(x): return 0
""",
    "forged length": r"""
import os
os.write(3, b'\xff\xff\xff\xff')
def double(x): return 0
""",
    "forged exceptions": FORGE
    + """
os.write(3, frame({'ready': True}))
for n in range(9): os.write(3, frame({'e': [None, 5, 'SystemExit', 'Lost', 'Unsupported']}))
def double(x): return 0
""",
    "forged errors of no list": FORGE
    + """
os.write(3, frame({'ready': True}))
for n in range(9): os.write(3, frame({'e': 7, 'text': ['x']}))
def double(x): return 0
""",
    "deep forged value": FORGE
    + """
os.write(3, frame({'ready': True}))
data = b'[' * 10000 + b']' * 10000
os.write(3, struct.pack('>I', 20000) + data)
def double(x): return 0
""",
    "thread that writes": FORGE
    + """
import threading, time
def work():
    while True:
        try: os.write(3, frame({'v': True}))
        except OSError: return
        time.sleep(0.001)
threading.Thread(target=work, daemon=True).start()
def double(x): return 0
""",
    "child that writes": FORGE
    + """
import time
if os.fork() == 0:
    for n in range(200):
        os.write(3, frame({'v': True}))
        time.sleep(0.001)
    os._exit(0)
def double(x): return 0
""",
    "mutated arguments": """
def double(x):
    if isinstance(x, list): x.clear()
    return []
""",
}

BUDGET: dict[str, str] = {
    "endless loop": """
def double(x):
    while True: pass
""",
    "endless loop that catches": """
def double(x):
    while True:
        try:
            while True: pass
        except BaseException: pass
""",
    "alarm off, then sleep": """
import signal, time
def double(x):
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    time.sleep(60)
""",
    "memory bomb": "def double(x): return [0] * (1 << 30)",
    "growing memory": """
def double(x):
    a = []
    while True: a.append(bytes(1 << 20))
""",
    "fork bomb": """
import os
def double(x):
    while True:
        try: os.fork()
        except OSError: pass
""",
    "endless output": """
def double(x):
    while True: print('PASS' * 1000)
""",
    "endless iterator": """
import itertools
def double(x): return itertools.count()
""",
    "endless nesting": """
def double(x):
    a = []
    a.append(a)
    return a
""",
    "colliding numbers": "def double(x): return {n * ((1 << 61) - 1) for n in range(3000)}",
    "giant forged value": FORGE
    + """
data = b'{"v":[' + b'[],' * 5_000_000 + b'1]}'
os.write(3, frame({'ready': True}))
view = memoryview(struct.pack('>I', len(data)) + data)
while view: view = view[os.write(3, view):]
""",
    "giant number": "def double(x): return 1 << 20_000_000",
    "giant text": "def double(x): return 'x' * 40_000_000",
}

STDIO: dict[str, str] = {
    "exit": """
import sys
sys.exit(0)
""",
    "hard exit": """
import os
os._exit(0)
""",
    "nothing": "pass",
    "markers": """
print('PASS')
print('OK')
print('{"passed": true}')
""",
    "right, then an error": """
print(2 * int(input()))
raise RuntimeError
""",
    "right, then a hard exit code": """
import os
print(2 * int(input()), flush=True)
os._exit(3)
""",
    "all small numbers": "for n in range(1000): print(n)",
    "reads files": """
import glob
for n in glob.glob('*') + glob.glob('/tmp/*'): print(open(n).read())
""",
    "writes the expected file": """
open('expected.txt', 'w').write('7')
print(7)
""",
    "endless loop": "while True: pass",
    "endless output": "while True: print('4')",
    "memory": """
a = []
while True: a.append(bytes(1 << 20))
""",
    "binary": r"""
import sys
sys.stdout.buffer.write(b'4\n\xff\xfe')
""",
    "zero bytes": r"""
import sys
sys.stdout.buffer.write(b'4\0')
""",
    "fork bomb": """
import os
while True:
    try: os.fork()
    except OSError: pass
""",
    "stderr": """
import sys
print(2 * int(input()), file=sys.stderr)
""",
}
