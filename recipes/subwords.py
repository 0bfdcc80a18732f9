"""Tokenises text and splits it into subwords: Moses' words and BPE, or SentencePiece."""

import functools
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from .languages import lower, one_line
from .steps import UserError, atomic_file, dry_run, make_file, remove, show_step
from .text import lines, open_to_write, write_lines

# ---- Moses' tokeniser
#
# Moses' tokeniser puts spaces around every character that is not in its lists of letters and digits. These lists are
# older than many scripts. Its normaliser removes unprintable characters. So raised digits (m²), combining accents,
# emoji of several characters and letters of newer scripts would be lost or separated from their words.
#
# Therefore each run of such characters is replaced by a stand-in before Moses reads a line, and put back afterwards. A
# stand-in is a letter of Canadian Syllabics, which Moses knows, that the line does not contain.

STAND_INS = [chr(code) for code in range(0x1401, 0x166D)]  # the letters of Canadian Syllabics
VARIATION_SELECTOR = "\ufe0f"  # makes an emoji of the character before it, such as ©
# Symbols from enclosed letters and pictures (㊗, ☂) to emoji, and what emoji are composed of. Moses may make words of
# other symbols (©, °, +, →).
PICTURES = "\u2300-\u23ff\u2460-\u24ff\u2600-\u27bf\u2b00-\u2bff\u3200-\u33ff\U0001f000-\U0001fbff\U000e0000-\U000e0fff"
JOINERS = "\u200c\u200d"
PRIVATE_USE = "\ue000-\uf8ff\U000f0000-\U0010ffff"
FIRST_AFTER_ASCII = 0x80  # the code of the first character that is not in ASCII
END_OF_LETTERS = 0x34000  # this character and those after it are no letters


@functools.cache
def characters_to_keep() -> "re.Pattern[str]":
    """Returns a pattern that finds the characters which Moses would wrongly remove or separate from their words.

    The pattern finds one or more of them in a row: parts of emoji, characters for private use, and the letters, marks
    and digits that are missing in Moses' lists.
    """
    # The selector makes an emoji of the visible character before it, such as ☎ or #.
    character_with_selector = r"\S" + VARIATION_SELECTOR
    single_character = f"[{JOINERS}{PRIVATE_USE}{PICTURES}{as_ranges(letters_unknown_to_moses())}]"
    return re.compile(f"(?:{character_with_selector}|{single_character})+")


def letters_unknown_to_moses() -> list[str]:
    """Returns the letters, marks and numbers that Moses takes for punctuation, because its lists do not have them.

    They are in ascending order.
    """
    from sacremoses import MosesTokenizer

    known_to_moses = re.compile(f"[{MosesTokenizer.IsAlnum}]")
    unknown: list[str] = []
    for code in range(FIRST_AFTER_ASCII, END_OF_LETTERS):
        character = chr(code)
        category = unicodedata.category(character)  # such as "Lu", an upper-case letter, or "Nd", a decimal number
        is_word_character = category.startswith(("L", "M", "N"))  # letters, marks and numbers
        if is_word_character and not known_to_moses.match(character):
            unknown.append(character)
    return unknown


class CharacterRange(NamedTuple):
    """Characters whose codes follow each other, such as a, b, c and d."""

    first: str
    last: str


def as_ranges(characters: Sequence[str]) -> str:
    """Returns characters as the inside of a character class of a regular expression.

    For example, "abcdf" becomes "a-df-f", which has two ranges: "a-d" and "f-f". `characters`: single characters in
    ascending order.
    """
    ranges: list[CharacterRange] = []
    for character in characters:
        continues_range = bool(ranges) and ord(character) == ord(ranges[-1].last) + 1
        if continues_range:
            ranges[-1] = CharacterRange(ranges[-1].first, last=character)
        else:
            ranges.append(CharacterRange(first=character, last=character))
    return "".join(f"{re.escape(first)}-{re.escape(last)}" for first, last in ranges)


def choose_stand_ins(line: str) -> dict[str, str]:
    """Chooses the letters that protect a line from Moses' tokeniser. The same line always gets the same letters.

    Moses would remove some characters, and separate others from their words. While it reads the line, each run of such
    characters is replaced by a letter that is not in the line, its stand-in. For example, "5 m² and 3 m² 👍🏽" becomes
    "5 mᐁ and 3 mᐁ ᐂ".

    Returns:
        {run of characters: its stand-in}, which is {"²": "ᐁ", "👍🏽": "ᐂ"} for this example.
    """
    if line.isascii():  # none of these characters is in ASCII; most lines are spared the slow search
        return {}
    free_letters = (letter for letter in STAND_INS if letter not in line)
    stand_ins: dict[str, str] = {}
    for run in characters_to_keep().findall(line):
        if run in stand_ins:
            continue
        letter = next(free_letters, None)
        if letter is None:  # Then Moses treats the remaining runs in its own way.
            break
        stand_ins[run] = letter
    return stand_ins


def with_stand_ins(line: str) -> str:
    """Returns a line in which stand-ins replace the runs of characters that Moses would remove or separate."""
    stand_ins = choose_stand_ins(line)
    if not stand_ins:
        return line
    return characters_to_keep().sub(lambda match: stand_ins.get(match[0], match[0]), line)


def without_stand_ins(words: str, line: str) -> str:
    """Returns the words that Moses made of a line with stand-ins, with the original characters instead of these.

    Args:
        words: the output of Moses.
        line: the line before `with_stand_ins` replaced characters.
    """
    originals = {ord(letter): run for run, letter in choose_stand_ins(line).items()}
    return words.translate(originals)


def tokenize_file(
    text: Path, output: Path, language: str, *, processes: int, dash_splits: bool = False, stand_ins: bool = True
) -> None:
    """Splits the lines of a file into words by Moses' normaliser and tokeniser, and writes them to another file.

    Args:
        text: the file to read.
        output: the file to write, with spaces between the words; an existing file is kept.
        language: the code of the language.
        processes: how many processes share the work.
        dash_splits: words are split at hyphens too.
        stand_ins: protect the characters that Moses would remove or separate from their words. This is needed if the
            words are joined to a text again later.
    """
    if output.exists():
        return
    dashes = " -a" if dash_splits else ""
    # "normalize" and "tokenize" are two commands of sacremoses, which it runs one after the other.
    moses_command = f"sacremoses --quiet -l {language} -j {processes} normalize -c tokenize{dashes}"
    # In a dry run, the text may not exist.
    has_characters_to_protect = stand_ins and not dry_run() and needs_stand_ins(text)
    if has_characters_to_protect:
        tokenize_with_stand_ins(text, output, moses_command)
    else:
        make_file(output, f"{moses_command} < {quote(str(text))}")


def needs_stand_ins(text: Path) -> bool:
    """Returns whether a file has characters that Moses would remove or separate from their words."""
    return any(choose_stand_ins(line) for line in lines(text))


def tokenize_with_stand_ins(text: Path, output: Path, moses_command: str) -> None:
    """Tokenises a file by Moses, protected by stand-ins for the characters that Moses would remove or separate.

    Args:
        text: the file to read.
        output: the file to write.
        moses_command: the shell command that tokenises its standard input.
    """
    text_with_stand_ins = output.with_name(f"{output.name}.stand-ins")
    words_with_stand_ins = output.with_name(f"{output.name}.words")
    show_step(f"{text_with_stand_ins}: {text}, in which letters replace what Moses would split, such as m² and emoji")
    try:
        # 1. replace the characters
        with atomic_file(text_with_stand_ins) as part:
            write_lines(part, (with_stand_ins(line) for line in lines(text)))
        # 2. tokenise
        make_file(words_with_stand_ins, f"{moses_command} < {quote(str(text_with_stand_ins))}")
        # 3. put the characters back
        show_step(f"{output}: {words_with_stand_ins}, in which the characters of {text} are restored")
        words_and_lines = zip(lines(words_with_stand_ins), lines(text), strict=True)
        with atomic_file(output) as part:
            write_lines(part, (without_stand_ins(words, line) for words, line in words_and_lines))
    finally:
        remove(text_with_stand_ins)
        remove(words_with_stand_ins)


def tokenize_line(line: str, language: str, dash_splits: bool) -> str:
    """Returns the words of a line with spaces between them, exactly as `tokenize_file` writes them."""
    from sacremoses import MosesPunctNormalizer

    normalizer = MosesPunctNormalizer(language, post_remove_control_chars=True)
    tokenizer = moses_tokenizer(language)
    normalized = normalizer.normalize(with_stand_ins(line))
    words = tokenizer.tokenize(normalized, aggressive_dash_splits=dash_splits, return_str=True)
    return without_stand_ins(words, line)


@functools.cache  # since it reads a list of abbreviations each time
def moses_tokenizer(language: str) -> Any:
    """Returns sacremoses' tokeniser for a language."""
    from sacremoses import MosesTokenizer

    return MosesTokenizer(language)


# ---- BPE


def learn_bpe(files: Sequence[Path], codes: Path, merges: int) -> None:
    """Learns the merges of byte-pair encoding from several files together, and writes them to the file `codes`."""
    names = " ".join(quote(str(path)) for path in files)
    make_file(codes, f"cat {names} | subword-nmt learn-bpe -s {merges}")


def apply_bpe(codes: Path, text: Path, output: Path, *, processes: int, max_length: int | None) -> None:
    """Splits the words of a file into subwords, and writes them to another file.

    Args:
        codes: the merges that `learn_bpe` has written.
        text: the file to read, with spaces between the words.
        output: the file to write; an existing file is kept.
        processes: how many processes share the work.
        max_length: the number of subwords, including the end-of-sentence symbol, that lines are cut to; None: lines are
            not cut.
    """
    command = f"subword-nmt apply-bpe -c {quote(str(codes))}"
    if processes > 1:
        # Several processes can only read a named file, not the standard input.
        command += f" --num-workers {processes} -i {quote(str(text))}"
    else:
        command += f" < {quote(str(text))}"
    if max_length:
        # `cut` keeps the first subwords of each line. The file has no end-of-sentence symbol, but it counts.
        command += f" | cut -d ' ' -f -{max_length - 1}"
    make_file(output, command)


def make_bpe_splitter(codes: Path, language: str, dash_splits: bool) -> Callable[[str], list[str]]:
    """Returns a function that splits one line of text into words by Moses, and the words into BPE's subwords.

    Args:
        codes: the merges that `learn_bpe` has written.
        language: the language of the text.
        dash_splits: whether words are split at hyphens too.
    """
    from subword_nmt.apply_bpe import BPE

    with open(codes, encoding="utf-8") as merges:
        bpe = BPE(merges)

    def split_into_subwords(text: str) -> list[str]:
        """Returns the subwords of a line."""
        line_of_words = tokenize_line(text, language, dash_splits)
        line_of_subwords = str(bpe.process_line(line_of_words))
        return line_of_subwords.split()

    return split_into_subwords


# ---- SentencePiece

BEGINNING_OF_WORD = "\u2581"  # SentencePiece's character for the space before a word


def learn_pieces(files: Sequence[Path], model: Path, *, size: int, block_size: int | None, normalization: str) -> None:
    """Learns a SentencePiece model from several files together.

    Args:
        files: the training text.
        model: the file to write; an existing file is kept.
        size: how many subwords ("pieces") are learned; the value of --merges.
        block_size: for T5's denoising, the number of words in an example; None for other text. It determines how many
            of the marks that stand for missing words become pieces.
        normalization: the name of SentencePiece's rule that replaces variants of letters, or "identity" for no rule.

    Raises:
        UserError: `size` is too small for the number of different characters in the text.
    """
    names = " ".join(str(path) for path in files)
    show_step(f"{model}: SentencePiece, {size} pieces of {names}")
    if dry_run() or model.exists():
        return
    import sentencepiece

    marks = list_span_marks(block_size) if block_size else []
    with atomic_file(model) as part, open(part, "wb") as file:
        try:
            sentencepiece.SentencePieceTrainer.train(
                input=[str(path) for path in files],
                model_writer=file,
                vocab_size=size,
                hard_vocab_limit=False,  # a small text has fewer pieces
                character_coverage=1.0,  # French and German have few characters, so all can be pieces
                input_sentence_size=10_000_000,  # SentencePiece draws this many lines from a longer text
                max_sentence_length=1 << 20,  # bytes: an article may be one line
                shuffle_input_sentence=True,
                user_defined_symbols=marks,
                normalization_rule_name=normalization,
                minloglevel=2,  # print errors only
            )
        except RuntimeError as error:
            raise UserError(f"--merges {size}: {explain_training_error(error)}") from None


def explain_training_error(error: RuntimeError) -> str:
    """Returns why SentencePiece could not learn a model, and what to do if the number of pieces was too small."""
    # Each character of the text has to be a piece. This is the number of the characters.
    smallest_number = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
    if smallest_number:
        return f"the text has more different characters than that; use {smallest_number[1]} or more"
    return str(error).splitlines()[0]


def list_span_marks(block_size: int) -> list[str]:
    """Returns the marks, such as "<extra_id_0>", that stand for the missing spans in an example of T5's denoising.

    There is one mark more than an example has spans. `block_size`: the number of words in an example.
    """
    # `pairs.corrupt_spans` removes 15 % of the words, in spans of 3 words on average
    number_of_spans = max(1, round(block_size * 0.15 / 3))
    return [f"<extra_id_{number}>" for number in range(number_of_spans + 1)]


def apply_pieces(model: Path, text: Path, output: Path, *, max_length: int | None, keep_end: bool) -> None:
    """Splits the lines of a file into SentencePiece's subwords ("pieces"), and writes them to another file.

    Args:
        model: a SentencePiece model, made by `learn_pieces`.
        text: the file to read.
        output: the file to write, with spaces between the pieces; an existing file is kept.
        max_length: the number of pieces, including the end-of-sentence symbol, that lines are cut to; None: lines are
            not cut.
        keep_end: a line that is too long loses its beginning instead of its end.
    """
    note_on_length = f", cut to {max_length}" if max_length else ""
    show_step(f"{output}: {text} in pieces{note_on_length}")
    if dry_run() or output.exists():
        return
    split_into_pieces = make_piece_splitter(model)
    with atomic_file(output) as part, open_to_write(part) as file:
        for line in lines(text):
            pieces = cut_to_length(split_into_pieces(line), max_length, keep_end)
            file.write(f"{' '.join(pieces)}\n")


def make_piece_splitter(model: Path) -> Callable[[str], list[str]]:
    """Returns a function that splits a text into the pieces of a SentencePiece model."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))

    def split_into_pieces(text: str) -> list[str]:
        """Returns the pieces of a text."""
        return list(processor.encode(text, out_type=str))

    return split_into_pieces


def cut_to_length(subwords: Sequence[str], max_length: int | None, keep_end: bool) -> Sequence[str]:
    """Returns the subwords of a line, cut to a maximum length.

    Args:
        subwords: the subwords of the line.
        max_length: the maximum length, including the end-of-sentence symbol; None: the line is not cut.
        keep_end: whether the last subwords are kept instead of the first ones. Then the line starts at the beginning of
            a word, unless it is within a single long word.
    """
    if not max_length:
        return subwords
    most_subwords = max_length - 1  # without the end-of-sentence symbol
    if len(subwords) <= most_subwords:
        return subwords
    if keep_end:
        return without_partial_word(subwords[len(subwords) - most_subwords :])
    return subwords[:most_subwords]


def without_partial_word(pieces: Sequence[str]) -> Sequence[str]:
    """Returns SentencePiece's pieces from the first beginning of a word on; all pieces if no word begins there."""
    for index, piece in enumerate(pieces):
        if piece.startswith(BEGINNING_OF_WORD):
            return pieces[index:]
    return pieces


# ---- lines that are translated


def make_line_preparer(data: Path, settings: Mapping[str, Any], language: str) -> Callable[[str], str]:
    """Returns a function that prepares a line of text as prepare.sh has prepared the source sentences.

    The function takes a line of text, and returns its subwords with spaces between them.

    Args:
        data: a folder with data prepared by prepare.sh.
        settings: the settings of these data.
        language: the language of the lines.
    """
    max_length = settings["truncate-source"]
    if settings["subwords"] == "sentencepiece":
        split_into_subwords = make_piece_splitter(data / "pieces.model")
        keep_end = bool(settings["keep-end"])
    else:
        split_into_subwords = make_bpe_splitter(data / "codes", language, dash_splits=bool(settings["dash-splits"]))
        keep_end = False  # prepare.sh has no --keep-end for BPE

    def prepare_line(line: str) -> str:
        """Returns the subwords of a line, cut to the maximum length of source sentences."""
        text = one_line(line)
        if settings["lowercase"]:
            text = lower(text, language)
        return " ".join(cut_to_length(split_into_subwords(text), max_length, keep_end))

    return prepare_line
