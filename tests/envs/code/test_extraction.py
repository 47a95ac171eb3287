"""Where the program is in a response."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.envs.code.extraction import extract, fenced_blocks


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("```python\na\n```\n```bash\nls\n```", "a\n"),
        ("```\na\n```\n```python\nb\n```\n```\nc\n```", "b\n"),
        ("```\na\n```\nand\n```\nb\n```", "b\n"),
        ("<think>```python\na\n```</think>```python\nb\n```", "b\n"),
        ("```python\na\n```</think>```python\nb\n```", "b\n"),
        ("text\n```python\na\n", "a\n"),
        ("````python\na = '''\n```\n'''\n````", "a = '''\n```\n'''\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("```Python title=x\na\n```", "a\n"),
        ("  ```python\na\n  ```", "a\n"),
        ("```python\r\na\r\n```", "a\r\n"),
        ("1. Do:\n\n    ```python\n    print('</think>')\n    ```", "print('</think>')\n"),
        ("> ```python\n> a\n> ```", "a\n"),
        ("```python\na = '''\n```\n'''\n```", "a = '''\n```\n'''\n"),
        ("```python\na = '''\n```\nDone.", "a = '''\n"),
    ],
)
def test_a_program_in_a_fence(response, code):
    extracted = extract(response, "python")
    assert extracted is not None
    assert (extracted.code, extracted.fenced) == (code, True)


def test_a_response_without_a_fence_is_a_program_as_a_whole():
    extracted = extract("def f():\n    return 1\n", "python")
    assert extracted is not None
    assert not extracted.fenced


@pytest.mark.parametrize("response", ["", "  \n", "<think>```python\na\n```", "```bash\nls\n```"])
def test_no_program(response):
    assert extract(response, "python") is None


def test_each_language_has_its_own_blocks():
    response = "```cpp\nint main(){}\n```\n```python\na\n```"
    extracted = extract(response, "cpp")
    assert extracted is not None
    assert extracted.code == "int main(){}\n"


@given(st.text(alphabet="`~\npy thon<>/", max_size=60))
def test_no_text_is_too_odd(text):
    extract(text, "python")
    assert all("\0" not in code for _, code in fenced_blocks(text))
