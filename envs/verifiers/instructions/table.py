"""All instructions by their names: IFEval's 25, and the 29 that open-instruct added (IFEvalG).

Sources: Zhou et al. 2023 (IFEval, arXiv:2311.07911), google-research/instruction_following_eval, and
allenai/open-instruct's IFEvalG; written afresh from what they decide.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from rollgym.envs.verifiers.arguments import Reader, count, relation, text, texts, word
from rollgym.envs.verifiers.instructions import copies, formats, keywords, lengths, wording


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction that can be checked.

    Attributes:
        follows: Whether a text follows it, given its arguments.
        arguments: How each argument is read.
        optional: Arguments that need not be said.
    """

    follows: Callable[..., bool]
    arguments: Mapping[str, Reader] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()


_IFEVAL = {
    "keywords:existence": Instruction(keywords.existence, {"keywords": texts}),
    "keywords:frequency": Instruction(
        keywords.frequency, {"keyword": text, "frequency": count, "relation": relation}
    ),
    "keywords:forbidden_words": Instruction(keywords.forbidden_words, {"forbidden_words": texts}),
    "keywords:letter_frequency": Instruction(
        keywords.letter_frequency, {"letter": text, "let_frequency": count, "let_relation": relation}
    ),
    "language:response_language": Instruction(wording.language, {"language": text}),
    "length_constraints:number_sentences": Instruction(
        lengths.sentences, {"num_sentences": count, "relation": relation}
    ),
    "length_constraints:number_paragraphs": Instruction(lengths.paragraphs, {"num_paragraphs": count}),
    "length_constraints:number_words": Instruction(lengths.words, {"num_words": count, "relation": relation}),
    "length_constraints:nth_paragraph_first_word": Instruction(
        lengths.first_word_of_paragraph, {"num_paragraphs": count, "nth_paragraph": count, "first_word": text}
    ),
    "detectable_content:number_placeholders": Instruction(formats.placeholders, {"num_placeholders": count}),
    "detectable_content:postscript": Instruction(formats.postscript, {"postscript_marker": text}),
    "detectable_format:number_bullet_lists": Instruction(formats.bullets, {"num_bullets": count}),
    "detectable_format:constrained_response": Instruction(formats.constrained_response),
    "detectable_format:number_highlighted_sections": Instruction(
        formats.highlights, {"num_highlights": count}
    ),
    "detectable_format:multiple_sections": Instruction(
        formats.sections, {"section_spliter": text, "num_sections": count}
    ),
    "detectable_format:json_format": Instruction(formats.is_json),
    "detectable_format:title": Instruction(formats.title),
    "combination:two_responses": Instruction(copies.two_responses),
    "combination:repeat_prompt": Instruction(copies.repeats_prompt, {"prompt_to_repeat": text}),
    "startend:end_checker": Instruction(wording.ends_with, {"end_phrase": text}),
    "startend:quotation": Instruction(wording.quoted),
    "change_case:capital_word_frequency": Instruction(
        wording.capital_words, {"capital_frequency": count, "capital_relation": relation}
    ),
    "change_case:english_capital": Instruction(wording.english_capital),
    "change_case:english_lowercase": Instruction(wording.english_lowercase),
    "punctuation:no_comma": Instruction(wording.no_comma),
}

_EXTENSION = {
    "copy:repeat_phrase": Instruction(copies.varies_phrase, {"phrase": text, "small_n": count}),
    "copy:copy": Instruction(copies.copies, {"prompt_to_repeat": text}),
    "copy:copying_simple": Instruction(copies.copies, {"prompt_to_repeat": text}),
    "copy:copying_multiple": Instruction(copies.copies_several_times, {"prompt_to_repeat": text, "N": count}),
    "new:copy_span_idx": Instruction(
        copies.copies_span, {"prompt_to_repeat": text, "n_start": count, "n_end": count}
    ),
    "detectable_format:sentence_hyphens": Instruction(formats.hyphenated_sentences),
    "detectable_format:square_brackets": Instruction(formats.square_brackets),
    "detectable_format:bigram_wrapping": Instruction(formats.wrapped_bigrams),
    "keywords:no_adjacent_consecutive": Instruction(keywords.no_consecutive_letters),
    "keywords:word_once": Instruction(keywords.once, {"keyword": word}),
    "keywords:word_count_different_numbers": Instruction(
        keywords.frequency_exactly,
        {"keyword": word, "frequency": count, "relation": relation},
        optional=frozenset({"relation"}),
    ),
    "keywords:exclude_word_harder": Instruction(keywords.excluded_word, {"keyword": word}),
    "keywords:palindrome": Instruction(keywords.palindrome),
    "keywords:keyword_specific_position": Instruction(
        wording.word_at, {"keyword": word, "n": count, "m": count}
    ),
    "keywords:start_end": Instruction(wording.same_start_and_end),
    "paragraphs:paragraphs": Instruction(lengths.two_divided),
    "paragraphs:paragraphs2": Instruction(lengths.two_spaced),
    "first_word:first_word_sent": Instruction(wording.first_word_of_sentences, {"first_word": word}),
    "first_word:first_word_answer": Instruction(wording.first_word, {"first_word": word}),
    "last_word:last_word_sent": Instruction(wording.last_word_of_sentences, {"last_word": word}),
    "last_word:last_word_answer": Instruction(wording.last_word, {"last_word": word}),
    "punctuation:punctuation_dot": Instruction(wording.no_dot),
    "punctuation:punctuation_exclamation": Instruction(wording.no_exclamation_mark),
    "count:lowercase_counting": Instruction(keywords.lowercase_words, {"N": count}),
    "count:counting_composition": Instruction(lengths.composition, {"n_sent": count, "n_words": count}),
    "count:count_unique": Instruction(keywords.unique_words),
    "count:count_increment_word": Instruction(keywords.once_and_twice, {"keyword1": word, "keyword2": word}),
    "letters:letter_counting": Instruction(keywords.letters, {"N": count, "relation": relation}),
    "letters:letter_counting2": Instruction(
        keywords.letter_frequency, {"letter": text, "let_frequency": count, "let_relation": relation}
    ),
}

IFEVAL: Mapping[str, Instruction] = MappingProxyType(_IFEVAL)
"""The 25 of IFEval."""

INSTRUCTIONS: Mapping[str, Instruction] = MappingProxyType(_IFEVAL | _EXTENSION)
"""All that are named as IFEval names them."""
