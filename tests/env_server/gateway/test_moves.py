"""The file of where sessions went on."""

from pathlib import Path

from env_server.gateway.moves import Moves


def test_what_cannot_be_read_costs_one_move_and_no_start(tmp_path: Path) -> None:
    path = tmp_path / "moves.jsonl"
    moves = Moves(path)
    moves.moved("one", "node", "1")
    moves.close()
    with path.open("ab") as file:
        for line in (
            b"\x00\xff",
            b"5",
            b'["two"]',
            b'["three", 7]',
            b'[["four"], null]',
            b'["five", [1, 2]]',
        ):
            file.write(line + b"\n")
    moves = Moves(path)
    moves.moved("six", "node", "6")
    moves.close()
    again = Moves(path)
    assert [again.place(each) for each in ("one", "three", "six")] == [("node", "1"), None, ("node", "6")]
    again.close()
