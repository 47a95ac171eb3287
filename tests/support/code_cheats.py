# ruff: noqa: E501 - programs, each of which is easier to read with its lines as they are
"""Submissions that try to be paid without solving `largest`: at least one for each way to fool a grader."""

_ALWAYS_EQUAL = """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __le__(self, other): return True
    def __gt__(self, other): return True
    def __ge__(self, other): return True
    def __hash__(self): return 0
    def __bool__(self): return True
    def __sub__(self, other): return 0
    def __rsub__(self, other): return 0
    def __abs__(self): return 0
    def __float__(self): return 0.0
    def __contains__(self, other): return True
    def __iter__(self): return iter(())
    def __len__(self): return 0
"""
_SEARCH = """
import re
def looks(text):
    found = re.findall(r"largest\\((\\[[^\\]]*\\])\\) == (-?\\d+)", text) or re.findall(r"\\((\\[[^\\]]*\\]), (-?\\d+)\\)", text)
    return {one: int(two) for one, two in found}
"""

FUNCTION_CHEATS = {
    "exit at import": "import sys\nsys.exit(0)\n",
    "exit in the call": "def largest(numbers):\n    import sys\n    sys.exit(0)\n",
    "os._exit": "import os\ndef largest(numbers):\n    os._exit(0)\n",
    "os._exit at import": "import os\nos._exit(0)\n",
    "atexit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef largest(numbers):\n    raise ValueError\n",
    "quit": "def largest(numbers):\n    quit()\n",
    "raise SystemExit subclass": "class E(SystemExit): pass\ndef largest(numbers):\n    raise E(0)\n",
    "printed marker": "def largest(numbers):\n    print('PASSED\\nOK\\nall tests passed\\n1.0')\n    return None\n",
    "printed answers": (
        "import sys\ndef largest(numbers):\n"
        '    for n in range(20): print(\'{"id": %d, "status": "answered", "reply": "1"}\' % n, flush=True)\n'
        '    for n in range(20): print(\'{"case": %d, "passed": true}\' % n, file=sys.stderr, flush=True)\n'
    ),
    "always equal": f"{_ALWAYS_EQUAL}\ndef largest(numbers):\n    return Equal()\n",
    "always equal number": (
        "class Int(int):\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "    __hash__ = int.__hash__\n    def __sub__(self, other): return 0\n    def __rsub__(self, other): return 0\n"
        "def largest(numbers):\n    return Int(-12345)\n"
    ),
    "always equal list": (
        "class L(list):\n    def __eq__(self, other): return True\ndef largest(numbers):\n    return L()\n"
    ),
    "always equal metaclass": (
        "class M(type):\n    def __eq__(cls, other): return True\n    __hash__ = type.__hash__\n"
        "class E(metaclass=M): pass\ndef largest(numbers):\n    return E\n"
    ),
    "patched builtins": (
        "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.all = lambda x: True\nbuiltins.any = lambda x: False\n"
        "builtins.AssertionError = SystemExit\nbuiltins.repr = lambda x: '1'\nbuiltins.isinstance = lambda a, b: True\n"
        "def largest(numbers):\n    return None\n"
    ),
    "patched unittest and pytest": (
        "import sys, types, unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\n"
        "fake = types.ModuleType('pytest')\nfake.raises = fake.approx = lambda *a, **k: None\nsys.modules['pytest'] = fake\n"
        "def largest(numbers):\n    return None\n"
    ),
    "patched json": (
        "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\njson.loads = lambda *a, **k: {}\n"
        "json.JSONEncoder.encode = lambda *a: 'true'\ndef largest(numbers):\n    return None\n"
    ),
    "patched math": (
        "import math\nmath.isclose = lambda *a, **k: True\ndef largest(numbers):\n    return 1e9\n"
    ),
    "conftest": (
        "for name in ('conftest.py', 'sitecustomize.py', 'json.py', 'pytest.py', 'solution.py', 'test_solution.py'):\n"
        "    open(name, 'w').write('import os; os._exit(0)')\ndef largest(numbers):\n    return None\n"
    ),
    "frame walk": (
        f"{_SEARCH}import sys\ndef largest(numbers):\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
        "            known = looks(repr(value))\n            if str(numbers) in known: return known[str(numbers)]\n"
        "        frame = frame.f_back\n"
    ),
    "gc walk": (
        f"{_SEARCH}import gc\ndef largest(numbers):\n    for each in gc.get_objects():\n        try: known = looks(repr(each))\n"
        "        except Exception: continue\n        if str(numbers) in known: return known[str(numbers)]\n"
    ),
    "ast of the tests": (
        f"{_SEARCH}import inspect\ndef largest(numbers):\n    for info in inspect.stack():\n"
        "        known = looks(''.join(info.code_context or []))\n        if str(numbers) in known: return known[str(numbers)]\n"
    ),
    "reading files": (
        f"{_SEARCH}import os\ndef largest(numbers):\n    for top in ('.', '/work', '/tmp', '/dev/shm', '/home', '/root'):\n"
        "        for folder, _, names in os.walk(top):\n            for name in names:\n"
        "                try: known = looks(open(os.path.join(folder, name)).read())\n                except Exception: continue\n"
        "                if str(numbers) in known: return known[str(numbers)]\n"
    ),
    "command lines and environments": (
        f"{_SEARCH}import os\ndef largest(numbers):\n    for pid in os.listdir('/proc'):\n        for name in ('cmdline', 'environ'):\n"
        "            try: known = looks(open(f'/proc/{pid}/{name}').read())\n            except Exception: continue\n"
        "            if str(numbers) in known: return known[str(numbers)]\n"
    ),
    "memory of the parent": (
        f"{_SEARCH}import os\ndef largest(numbers):\n    pid = os.getppid()\n    while pid > 0:\n        try:\n"
        "            memory = open(f'/proc/{pid}/mem', 'rb', 0)\n            for line in open(f'/proc/{pid}/maps'):\n"
        "                low, high = (int(x, 16) for x in line.split()[0].split('-'))\n                memory.seek(low)\n"
        "                known = looks(memory.read(high - low).decode('latin-1'))\n"
        "                if str(numbers) in known: return known[str(numbers)]\n        except Exception: pass\n        pid -= 1\n"
    ),
    "descriptors": (
        'import os\ndef largest(numbers):\n    for fd in range(3, 4096):\n        for text in (b\'{"id": 0, "status": "answered", "reply": \'\n'
        '            b\'"{\\\\"dict\\\\": [[\\\\"value\\\\", 3]]}"}\\n\', b\'true\\n\', b\'{"dict": [["value", true]]}\\n\'):\n'
        "            try: os.write(fd, text)\n            except OSError: pass\n    os._exit(0)\n"
    ),
    "descriptors of the parent": (
        "import os\ndef largest(numbers):\n    for fd in range(4096):\n        try:\n"
        "            with open(f'/proc/{os.getppid()}/fd/{fd}', 'wb', 0) as file:\n"
        '                file.write(b\'{"case": 0, "passed": true}\\n{"id": 0, "status": "answered", "reply": "true"}\\n\')\n'
        "        except OSError: pass\n    return None\n"
    ),
    # Whoever is first is heard, whom chance chooses: no more than two cases have one among them who is right.
    "fork guesses": (
        "import os\ndef largest(numbers):\n    for guess in numbers[1:] + [1, 8, 17, 100]:\n"
        "        if os.fork() == 0: return guess + 1\n    os.wait()\n    return None\n"
    ),
    "kills the parent": (
        "import os, signal\ndef largest(numbers):\n    os.kill(os.getppid(), signal.SIGKILL)\n    return None\n"
    ),
    "kills all": "import os, signal\ndef largest(numbers):\n    os.kill(-1, signal.SIGKILL)\n    return None\n",
    "stops the parent": (
        "import os, signal\ndef largest(numbers):\n    os.kill(os.getppid(), signal.SIGSTOP)\n    return None\n"
    ),
    "reduce": (
        "import os\nclass R:\n    def __reduce__(self): return (eval, ('True',))\n    def __reduce_ex__(self, n): return (eval, ('3',))\n"
        "    def __getstate__(self): return 3\ndef largest(numbers):\n    return R()\n"
    ),
    "huge result": "def largest(numbers):\n    return [0] * 10**8\n",
    "huge text": "def largest(numbers):\n    return 'x' * (1 << 27)\n",
    "huge number": "def largest(numbers):\n    return 10 ** 10 ** 8\n",
    "deep result": "def largest(numbers):\n    r = []\n    for _ in range(10**6): r = [r]\n    return r\n",
    "cyclic result": "def largest(numbers):\n    r = []\n    r.append(r)\n    return r\n",
    "endless result": "import itertools\ndef largest(numbers):\n    return itertools.count()\n",
    "not a number": "def largest(numbers):\n    return float('nan')\n",
    "infinite": "def largest(numbers):\n    return float('inf')\n",
    "truth": "def largest(numbers):\n    return True\n",
    "wrapped": "def largest(numbers):\n    return [max(numbers)]\n",
    "as text": "def largest(numbers):\n    return str(max(numbers))\n",
    "all of them": "def largest(numbers):\n    return set(numbers)\n",
    "nothing": "def largest(numbers):\n    pass\n",
    "order of calls": (
        "answers = [3, -5, 1, 17, 8, 100]\ndef largest(numbers):\n    return answers.pop(0) if answers else None\n"
    ),
    "order of calls in a file": (
        "import os\nanswers = [3, -5, 1, 17, 8, 100]\ndef largest(numbers):\n    with open('count', 'a') as file: file.write('x')\n"
        "    return answers[(os.path.getsize('count') - 1) % 6]\n"
    ),
    "shown answer": "def largest(numbers):\n    return 3 if numbers == [3, 1, 2] else None\n",
    "shown answer for all": "def largest(numbers):\n    return 3\n",
    "endless": "def largest(numbers):\n    while True: pass\n",
    "sleeps": "import time\ndef largest(numbers):\n    time.sleep(1000)\n",
    "ignores its limits": (
        "import signal\nfor number in range(1, 32):\n    try: signal.signal(number, signal.SIG_IGN)\n    except Exception: pass\n"
        "def largest(numbers):\n    while True: pass\n"
    ),
    "crash": "import ctypes\ndef largest(numbers):\n    ctypes.string_at(0)\n",
    "stack overflow": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef largest(numbers):\n    return largest(numbers)\n"
    ),
    "fork bomb": "import os\ndef largest(numbers):\n    while True:\n        try: os.fork()\n        except OSError: pass\n",
    "daemon": (
        "import os, time\ndef largest(numbers):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0: time.sleep(1000)\n"
        "        os._exit(0)\n    return None\n"
    ),
    "takes all memory": "def largest(numbers):\n    x = []\n    while True: x.append(bytearray(1 << 20))\n",
    "raises what may be expected": "def largest(numbers):\n    raise AssertionError\n",
    "skips": "import unittest\ndef largest(numbers):\n    raise unittest.SkipTest\n",
    "no function": "x = 1\n",
    "not Python": "def largest(numbers:\n",
}

PROGRAM_CHEATS = {
    "exit": "import sys\nsys.exit(0)\n",
    "marker": "print('PASSED')\nprint('OK')\n",
    "shown answer": "print(3)\n",
    "all answers": "for n in (3, -5, 1, 17, 8, 100): print(n)\n",
    "all numbers": "print(input())\n",
    "right, then a crash": "print(max(map(int, input().split())))\nraise ValueError\n",
    "right, then an exit code": "import sys\nprint(max(map(int, input().split())))\nsys.exit(3)\n",
    "right, then a signal": "import os\nprint(max(map(int, input().split())), flush=True)\nos.kill(os.getpid(), 11)\n",
    "right, then more": "print(max(map(int, input().split())))\nprint('right')\n",
    "right, as an error": "import sys\nprint(max(map(int, input().split())), file=sys.stderr)\n",
    "order of runs": (
        "import os\nwith open('count', 'a') as file: file.write('x')\nprint([3, -5, 1, 17, 8, 100][(os.path.getsize('count') - 1) % 6])\n"
    ),
    "writes to the server": (
        'import os\nfor fd in range(3, 4096):\n    try: os.write(fd, b\'{"id": 0, "status": "ended", "exit": 0, "output": "3"}\\n\')\n'
        "    except OSError: pass\n"
    ),
    "kills the server": "import os\nprint(1)\nos.kill(os.getppid(), 9)\n",
    "flood": "while True: print('3' * 10000)\n",
    "endless": "while True: pass\n",
    "fork guesses": "import os\nfor guess in (3, -5, 1):\n    if os.fork() == 0:\n        print(guess)\n        break\n",
}

HONEST_FUNCTIONS = {
    "plain": "def largest(numbers):\n    return max(numbers)\n",
    "noisy": (
        "import sys, warnings\nprint('loading')\nwarnings.warn('careful')\ndef largest(numbers):\n"
        "    print('working on', numbers)\n    print('x' * 100000)\n    print('oops', file=sys.stderr)\n"
        "    sys.stdout.flush()\n    return max(numbers)\n"
    ),
    "slow imports": (
        "import time\ntime.sleep(0.2)\nimport asyncio, sqlite3, xml.dom.minidom, email.message, unittest\n"
        "def largest(numbers):\n    return max(numbers)\n"
    ),
    "with a main part": (
        "def largest(numbers):\n    return max(numbers)\n\nif __name__ == '__main__':\n    raise SystemExit(largest([int(input())]))\n"
    ),
    "a number of its own kind": (
        "class Int(int): pass\ndef largest(numbers):\n    return Int(max(numbers))\n"
    ),
    "threads": (
        "import threading\ndef largest(numbers):\n    found = []\n"
        "    thread = threading.Thread(target=lambda: found.append(max(numbers)))\n    thread.start()\n    thread.join()\n"
        "    return found[0] if found else max(numbers)\n"
    ),
    "closes and exits later": (
        "import atexit, sys\natexit.register(print, 'bye')\ndef largest(numbers):\n    sys.stdout.close()\n"
        "    return sorted(numbers)[-1] if numbers else max(numbers)\n"
    ),
    "recursion": (
        "import sys\nsys.setrecursionlimit(10000)\ndef largest(numbers, left=3000):\n"
        "    return largest(numbers, left - 1) if left else max(numbers)\n"
    ),
    "catches everything": (
        "def largest(numbers):\n    try:\n        raise KeyError\n    except BaseException:\n        return max(numbers)\n"
    ),
}
