"""The tiny policy's tokenizer: built here, from a list of words, byte for byte reversible.

Board symbols, digits and line ends are one token each, so that a cell of a drawn board is always the same distance in
tokens from its neighbour; the words that our environments and replies use are one token each; everything else falls
back to bytes.
"""

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from transformers import PreTrainedModel, PreTrainedTokenizerFast

PAD, END = "<|pad|>", "<|end|>"
IMAGE = "<|image|>"
ROLES = ("system", "user", "assistant", "tool")
_SPECIAL = (PAD, END, *(f"<|{role}|>" for role in ROLES))

_WORDS = """
Left Right Up Down left right up down answer think state board Invalid invalid action actions valid reply the
The a an of to and or is are you You your on in at it move moves moved player box boxes target targets wall
walls floor hole holes goal frozen ice lake push pushes grid cell cells row rows column columns turn turns step
steps one two three reach avoid Solve solve What what equals equal plus minus times number numbers sum Answer
with only Reply each draw drawn symbol symbols means mean left. right. not into off if If from by for as this
that can cannot must do does game play reward rewards end ends ended no No yes Yes true false True False None
Reward
"""

# Each of these characters stands alone; letters form words, a leading space belongs to its word, the rest are runs.
_PIECES = r"[\n]|[0-9]|[_#@$*.+√XOPSGFHWBCA](?![a-z])| ?[A-Za-z]+|[^\sA-Za-z0-9]|\s"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
_WITH_PICTURES = CHAT_TEMPLATE.replace(
    "{{ message.content }}",
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}{%- for part in message.content -%}"
    f"{{%- if part.type == 'image' -%}}{IMAGE}{{%- else -%}}{{{{ part.text }}}}{{%- endif -%}}"
    "{%- endfor -%}{%- endif -%}",
)


def build_tiny_tokenizer(*, sees: bool = False) -> PreTrainedTokenizerFast:
    """Return the tiny policy's tokenizer; it is the same wherever and whenever it is built.

    Args:
        sees: Whether it has a token for pictures, behind all others, and its chat template writes it.
    """
    vocabulary: dict[str, int] = {}
    for token in (*_SPECIAL, *sorted(ByteLevel.alphabet())):
        vocabulary[token] = len(vocabulary)
    merges: list[tuple[str, str]] = []
    known: set[tuple[str, str]] = set()
    for word in _WORDS.split():
        for form in (word, f" {word}"):
            _add_merges(form, vocabulary, merges, known)
    core = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [Split(Regex(_PIECES), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    if sees:
        core.add_special_tokens([AddedToken(IMAGE, special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[f"<|{role}|>" for role in ROLES],
        chat_template=_WITH_PICTURES if sees else CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _add_merges(
    word: str, vocabulary: dict[str, int], merges: list[tuple[str, str]], known: set[tuple[str, str]]
) -> None:
    """Add the merges that build `word` from its first character on, one character at a time."""
    # The byte-level alphabet writes a space as this letter; all our words are ASCII otherwise.
    symbols = word.replace(" ", "Ġ")
    built = symbols[0]
    for symbol in symbols[1:]:
        pair = (built, symbol)
        built += symbol
        if pair not in known:
            known.add(pair)
            merges.append(pair)
        if built not in vocabulary:
            vocabulary[built] = len(vocabulary)


def stop_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the ids that the model's generation_config (and its config) name as ends: one, or a list of them.

    Instruct models often end their turns with another token than their tokenizer's end of text, and some with several.
    """
    configs = (getattr(model, "generation_config", None), model.config)
    return frozenset(each for config in configs for each in _listed(getattr(config, "eos_token_id", None)))


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return how many token ids a model knows.

    That is the height of its embedding. Tokenizers may have fewer tokens, and some have more.
    """
    return int(model.config.get_text_config().vocab_size)


def _listed(value: int | Iterable[int] | None) -> Iterable[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else value
