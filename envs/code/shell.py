"""Shell-v0: a shell that keeps its state, a tree of files, and something to find or to bring about."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from rollgym.envs.code.conversation import ProgramSession
from rollgym.envs.code.sessions import SessionEnv, SessionGoal, same_answer
from rollgym.envs.code.turns import cut
from rollgym.envs.core.splits import Split, split_of_text

_MARGIN_SECONDS = 10.0


class ShellEnv(SessionEnv):
    """Shell commands run in a sandbox, turn by turn, until the goal is reached."""

    metadata: dict[str, Any] = SessionEnv.metadata | {
        "reply": {"language": "bash", "answer": True},
        "description": "A shell that keeps its state, and a goal in a tree of files.",
        "needs": "a sandbox",
        "baselines": {"random": 0, "constant action": 0, "expert": 1},
    }
    _blocks: ClassVar[tuple[str, ...]] = ("bash", "sh", "shell")
    _program: ClassVar[str] = "shell"

    def _draw(self, split: Split | None) -> SessionGoal:
        return draw_goal(self.np_random, split)

    def _greet(self, session: ProgramSession) -> None:
        pass

    def _run(self, session: ProgramSession, text: str) -> str:
        request = {"command": text, "seconds": self._seconds, "characters": 8 * self._characters}
        told = session.ask(request, self._seconds + _MARGIN_SECONDS)
        output = str(told.get("output", ""))
        if left_out := told.get("left_out"):
            output += f"\n[... {left_out} bytes are left out ...]"
        shown = cut(output, self._characters)
        if told.get("status") == "late":
            return f"{shown}\n[the time was over; the shell was started anew]".lstrip()
        if told.get("status") != "done":
            return f"{shown}\n[the shell ended and was started anew]".lstrip()
        code = told.get("exit")
        return f"{shown}\n[exit code {code}]".lstrip() if code else shown or "[no output]"

    def _judge(self, session: ProgramSession, answer: str) -> bool:
        if self._goal.left is None:
            return same_answer(self._goal.answer, answer)
        files = session.ask({"snapshot": "project"}, _MARGIN_SECONDS).get("files")
        wanted = {
            path: [hashlib.sha256(content).hexdigest(), executable]
            for path, (content, executable) in self._goal.left.items()
        }
        return files == wanted

    def _instruction(self) -> str:
        return (
            "Reach the goal. You have a bash shell: what stands in a block that begins with ```bash is run in the "
            "working directory, and its output shown; variables and the directory are kept from turn to turn. When you "
            "are done, reply with the answer alone, in answer tags: <answer>42</answer>. "
            f"You have {self._limit} turns."
        )


_FOLDERS = ("app", "app/core", "data", "docs", "docs/old", "tools")
_STEMS = ("alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "theta")
_ENDS = (".log", ".txt", ".tmp", ".sh", ".csv")
_WORDS = ("red", "green", "blue", "ERROR", "ok", "retry", "start", "stop")
_TRIES = 1000

_Tree = Mapping[str, bytes]
_Left = dict[str, tuple[bytes, bool]]


def draw_goal(rng: np.random.Generator, split: Split | None) -> SessionGoal:
    """Draw a goal of a split with its files.

    Raises:
        ValueError: None was found.
    """
    for _ in range(_TRIES):
        tree = _draw_tree(rng)
        goal = _KINDS[int(rng.integers(len(_KINDS)))](tree, rng)
        if split is None or split_of_text(f"{goal.question}{sorted(tree)}") == split:
            return goal
    raise ValueError(f"no goal of the split {split} in {_TRIES} tries")


def _draw_tree(rng: np.random.Generator) -> _Tree:
    tree: dict[str, bytes] = {}
    for folder in _FOLDERS:
        for _ in range(int(rng.integers(2, 5))):
            name = f"{_STEMS[int(rng.integers(len(_STEMS)))]}{_ENDS[int(rng.integers(len(_ENDS)))]}"
            lines = [
                " ".join(_WORDS[int(each)] for each in rng.integers(0, len(_WORDS), 4))
                for _ in range(int(rng.integers(0, 8)))
            ]
            tree[f"project/{folder}/{name}"] = "".join(f"{line}\n" for line in lines).encode()
    return tree


def _asked(text: str, tree: _Tree, answer: object, command: str) -> SessionGoal:
    return SessionGoal(text, tree, answer=str(answer), solution=(command,))


def _made(text: str, tree: _Tree, left: _Left, command: str) -> SessionGoal:
    ending = " Change nothing else below project. When it is done, answer <answer>done</answer>."
    return SessionGoal(text + ending, tree, answer="done", solution=(command,), left=left)


def _as_it_is(tree: _Tree) -> _Left:
    return {path: (content, False) for path, content in tree.items()}


def _count_files(tree: _Tree, rng: np.random.Generator) -> SessionGoal:
    end = _ENDS[int(rng.integers(len(_ENDS)))]
    count = sum(path.endswith(end) for path in tree)
    return _asked(
        f"How many files below project, at any depth, have a name that ends in {end}?",
        tree,
        count,
        f"find project -type f -name '*{end}' | wc -l",
    )


def _count_lines(tree: _Tree, rng: np.random.Generator) -> SessionGoal:
    word = _WORDS[int(rng.integers(len(_WORDS)))]
    lines = [line.split() for content in tree.values() for line in content.decode().splitlines()]
    return _asked(
        f"How many lines of all files below project have the word {word} in them?",
        tree,
        sum(word in line for line in lines),
        f"grep -rhw {word} project | wc -l",
    )


def _most_errors(tree: _Tree, rng: np.random.Generator) -> SessionGoal:
    counts = {path: content.decode().split().count("ERROR") for path, content in tree.items()}
    best = min(counts, key=lambda path: (-counts[path], path))
    return _asked(
        "Which file below project has the word ERROR most often? Answer with its path, which begins with project/; "
        "of several such files, the first in alphabetical order.",
        tree,
        best,
        'for f in $(find project -type f | LC_ALL=C sort); do echo "$(grep -ow ERROR "$f" | wc -l) $f"; done'
        " | sort -k1,1nr -s | head -1",
    )


def _total_bytes(tree: _Tree, rng: np.random.Generator) -> SessionGoal:
    folder = _FOLDERS[int(rng.integers(len(_FOLDERS)))]
    total = sum(len(content) for path, content in tree.items() if path.startswith(f"project/{folder}/"))
    return _asked(
        f"How many bytes do the files below project/{folder}, at any depth, have together?",
        tree,
        total,
        f"find project/{folder} -type f -exec cat {{}} + | wc -c",
    )


def _delete_empty(tree: _Tree, rng: np.random.Generator) -> SessionGoal:
    left = {path: each for path, each in _as_it_is(tree).items() if each[0]}
    return _made("Delete all empty files below project.", tree, left, "find project -type f -empty -delete")


def _rename(tree: _Tree, rng: np.random.Generator) -> SessionGoal:
    left = {
        f"{path[:-4]}.md" if path.endswith(".txt") else path: each for path, each in _as_it_is(tree).items()
    }
    command = 'find project -name \'*.txt\' | while read -r f; do mv "$f" "${f%.txt}.md"; done'
    return _made(
        "Rename every file below project that ends in .txt so that it ends in .md.", tree, left, command
    )


def _make_executable(tree: _Tree, rng: np.random.Generator) -> SessionGoal:
    left = {path: (content, path.endswith(".sh")) for path, content in tree.items()}
    command = "find project -name '*.sh' -exec chmod +x {} +"
    return _made("Make every file below project that ends in .sh executable.", tree, left, command)


def _collect_words(tree: _Tree, rng: np.random.Generator) -> SessionGoal:
    folder = _FOLDERS[int(rng.integers(len(_FOLDERS)))]
    words = {
        word
        for path, content in tree.items()
        if path.startswith(f"project/{folder}/")
        for word in content.decode().split()
    }
    text = "".join(f"{word}\n" for word in sorted(words)).encode()
    left = {**_as_it_is(tree), "project/words.txt": (text, False)}
    command = f"find project/{folder} -type f -exec cat {{}} + | tr ' ' '\\n' | LC_ALL=C sort -u > project/words.txt"
    return _made(
        f"Write all different words of the files below project/{folder}, at any depth, to project/words.txt: one a "
        "line, in the order of their bytes (capitals first).",
        tree,
        left,
        command,
    )


def _gather(tree: _Tree, rng: np.random.Generator) -> SessionGoal:
    end = _ENDS[int(rng.integers(len(_ENDS)))]
    left: _Left = {}
    for path, each in _as_it_is(tree).items():
        moved = f"project/trash/{path.removeprefix('project/').replace('/', '_')}"
        left[moved if path.endswith(end) else path] = each
    command = (
        f"mkdir -p project/trash; cd project; find . -name '*{end}' | sed 's,^./,,' | while read -r f; do "
        'mv "$f" "trash/${f//\\//_}"; done; cd ..'
    )
    return _made(
        f"Move every file below project that ends in {end} to the new directory project/trash. Its name there is its "
        "path without project/, with _ in place of each /.",
        tree,
        left,
        command,
    )


_KINDS: Sequence[Callable[[_Tree, np.random.Generator], SessionGoal]] = (
    *(_count_files, _count_lines, _most_errors, _total_bytes),
    *(_delete_empty, _rename, _make_executable, _collect_words, _gather),
)
