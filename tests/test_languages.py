"""Text of many languages: how it is cleaned, split into subwords, put together again and scored, in any locale.

The text comes from sentences.yaml, a page that says the same in all languages.
"""

import argparse
import itertools
import random
import re
import unicodedata

import pytest
import yaml
from fairseq.data.encoders.moses_tokenizer import MosesTokenizer as FairseqMoses
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE
from fairseq.data.encoders.subword_nmt_bpe import SubwordNMTBPE
from helpers import assert_refused, run_script
from small_text import small_model_flags

from recipes import checks, languages, metrics, prepare, train, translate
from recipes.steps import ROOT, as_arguments, load
from recipes.text import lines

# {language: its version of the page}
PAGE = yaml.safe_load((ROOT / "tests" / "sentences.yaml").read_text(encoding="utf-8"))
LANGUAGES = [language for language in PAGE if language != "en"]
# arguments of train.sh: two updates of a small model
TRAINING = "--max-update 2 --save-every 2 -- --validate-interval-updates 2 --data-buffer-size 0".split()
TRAINING += as_arguments(small_model_flags("encoder", "decoder"))
# environment variables of a locale that has ASCII alone
ASCII_LOCALE = {
    "LC_ALL": "C",
    "LANG": "",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONIOENCODING": "latin-1",
}
NUM_OTHER_SENTENCES = 4  # the number of sentences with which `sentences` begins, before the combinations
NUM_TEST_SENTENCES = 24  # the size of the test set of `write_corpus`


def sentences(language):
    """Returns the sentences of the page in a language; line by line, they are translations of each other.

    First come four sentences of their own, then all combinations of who does what where.
    """
    page = PAGE[language]
    combined_sentences = []
    for who, what, where in itertools.product(page["who"], page["what"], page["where"]):
        combined_sentences.append(page["form"].format(who=who, what=what, where=where))
    return page["others"] + combined_sentences


@pytest.mark.parametrize("text, expected", [
    # Spaces of all kinds, and ends of lines, become blanks. Several of them become one blank.
    ("a\tb", "a b"), ("a\u00a0!", "a !"), ("a\u202f:", "a :"), ("a\u3000b", "a b"), ("a\u2009b", "a b"),
    ("a\u2028b\u2029c", "a b c"), ("a\x85b\x0bc\x0cd\x1ce\x1ff", "a b c d e f"), ("a\rb\r", "a b"), ("  a  b ", "a b"),
    ("a\u2581b", "a b"),
    # Characters without width and control characters are removed.
    ("\ufeffa\u200bb\u2060c\u00add", "abcd"), ("a\x00b\x07c\x1bd\x7fe", "abcde"),
    ("a\u200eb\u200fc\u202ad\u2066e", "abcde"),
    # Punctuation of Windows-1252 becomes that of Unicode.
    ("don\x92t \x93so\x94 \x96 \x80", "don’t “so” – €"), ("a\x81b", "ab"),
    # Letters and accents are composed, also if a hidden character stands between them.
    ("cafe\u0301", "café"), ("e\u200b\u0301", "é"), ("\u1112\u1161\u11ab", "한"),
    # All else stays: joiners, full-width letters, ligatures, Thai's am, selectors, letters without a composed form.
    *[(text, text) for text in ("می‌خواند", "शक्\u200dति", "３．５０％，ｱﾞ", "ﬁ½…²㈱", "น้ำ", "❤\ufe0f", "👩\u200d🚀",
        "क\u093c", "ß ẞ", "�")],
    # Signs without width stay if they belong to the spelling: of Mongolian vowels, or of the order of marks.
    ("ᠪᠠᠭ\u180eᠠ", "ᠪᠠᠭ\u180eᠠ"), ("ᠮᠣᠩᠭᠣᠯ\u180b", "ᠮᠣᠩᠭᠣᠯ\u180b"), ("a\u034fb", "a\u034fb"),
    # Ends of words stay, once each, if a script has no blanks.
    ("ភាសា\u200bខ្មែរ", "ភាសា\u200bខ្មែរ"), ("ไทย\u200b\u200bลาว\u200b 1\u200b2", "ไทย\u200bลาว 12"),
    ("ꦗ\u200bꦮ", "ꦗ\u200bꦮ"), ("မြန်\u200bUK", "မြန်\u200bUK"),
    # These variants of Chinese characters stay, because names are written with them. Normal forms would replace them.
    ("神福逸 \U0002f800e\u0301", "神福逸 \U0002f800é"),
    # Signs that look like letters become these letters.
    ("5 \u2126, 3 \u212b", "5 Ω, 3 Å"),
    # A line that shows nothing becomes empty.
    *[(text, "") for text in ("\u200b", "\ufeff", "\u200c", " \u200d\u00a0", "\u00ad\u2060", "\x07", "\u3164",
        "\u2800", "\ufe0f", "\u180b", "")],
])  # fmt: skip
def test_a_line_is_cleaned(text, expected):
    assert languages.one_line(text) == expected
    assert languages.one_line(expected) == expected  # a second time changes nothing


def test_every_character_stays_or_is_in_the_table():
    """Unicode's characters are kept in their composed form, but for those in the table of docs/languages.md."""
    for code in (*range(0x21, 0xD800), *range(0xE000, 0x30000)):
        character = chr(code)
        text = f"a{character}b"
        cleaned = languages.one_line(text)
        if unicodedata.name(character, "").startswith("CJK COMPATIBILITY IDEOGRAPH"):
            assert cleaned == text, hex(code)
        elif character not in languages.TABLE:
            assert cleaned == unicodedata.normalize("NFC", text), hex(code)
        becomes_space = " " in languages.TABLE.get(character, "")
        num_words = 2 if becomes_space else 1
        assert len(cleaned.split(" ")) == num_words, hex(code)  # fairseq divides a line into words at spaces


@pytest.mark.parametrize("text, language, expected", [
    ("ISPARTA İZMİR", "tr", "ısparta izmir"), ("IĞDIR", "az", "ığdır"), ("DIŞ", "tur_Latn", "dış"),
    ("İZMİR I", "en", "izmir i"),
    ("Straße STRASSE ẞ", "de", "straße strasse ß"), ("ΟΔΟΣ", "el", "οδος"), ("İ", "tr", "i"),
    # These languages have two letters i, too, in the Latin alphabet.
    *[("KIRIM QIRIM İT", language, "kırım qırım it")
      for language in ("crh_Latn", "crh", "gag", "tt_Latn", "kaz_Latn", "kk", "zza", "azb-Latn")],
    ("Қазақ тілінде IBM", "kk", "қазақ тілінде ibm"), ("IBM", "kk_Cyrl", "ibm"), ("IBM", "uz_Latn", "ibm"),
    ("J̃ Į́ Ì Š I", "lt", "j̇̃ į̇́ i̇̀ š i"), ("J̃ Ì", "en", "j̃ ì"),
])  # fmt: skip
def test_lower_case_follows_the_language(text, language, expected):
    composed_text = unicodedata.normalize("NFC", text)
    assert languages.lower(composed_text, language) == unicodedata.normalize("NFC", expected)


def test_lower_case_keeps_variants_of_chinese_characters():
    assert languages.lower("神田 A", "ja") == languages.lower("神田 A", "lt") == "神田 a"


@pytest.mark.parametrize("pair, kind", [
    ("en de", "bpe"), ("fr en", "bpe"), ("en ru", "bpe"), ("en th", "sentencepiece"), ("zh_CN en", "sentencepiece"),
    ("en tr", "sentencepiece"), ("hi en", "sentencepiece"), ("en de_AT", "sentencepiece"),
])  # fmt: skip
def test_default_subwords_of_a_pair_of_languages(pair, kind, dry_run, tmp_path):
    settings = prepare.prepare("own", pair.split(), out=tmp_path, source=None, chosen={"like": None})
    assert settings["subwords"] == kind


@pytest.mark.parametrize("language, tokenizer", [
    ("de", "13a"), ("zh_CN", "zh"), ("zho-Hans", "zh"), ("yue", "zh"), ("th", "char"), ("my_MM", "char"), ("fa", "13a"),
    ("JA", "ja-mecab"), ("kor_Hang", "ko-mecab"), ("zho_Hant", "zh"), ("yue_Hant", "zh"), ("lzh", "zh"),
    ("nan-Hant", "zh"), ("shn_Mymr", "char"), ("dzo_Tibt", "char"), ("jv-Java", "char"), ("ryu_Jpan", "char"),
    ("khb_Talu", "char"), ("jv_Latn", "13a"), ("en_news", "13a"),
])  # fmt: skip
def test_the_tokenizer_of_bleu_follows_the_language(language, tokenizer, monkeypatch, capsys):
    """If the package of a tokeniser is missing, BLEU counts characters, and prints which package would count words."""
    for name in ("ja", "ko"):
        monkeypatch.setattr(f"sacrebleu.tokenizers.tokenizer_{name}_mecab.MeCab", None)
    bleu = metrics.bleu.__wrapped__(language)
    printed = capsys.readouterr().out
    lacks_package = "mecab" in tokenizer
    if lacks_package:
        assert bleu.tokenizer_signature == "char"
        assert f'({tokenizer}): pip install "sacrebleu[{tokenizer[:2]}]"' in printed
    else:
        assert bleu.tokenizer_signature == tokenizer
        assert "pip install" not in printed


@pytest.mark.parametrize("language, text, tokenizer", [
    ("shn", "မႂ်ႇသုင်ၶႃႈ", "char"), ("mnw", "ဘာသာမန်", "char"), ("nod", "ᨣᩤᩴᨾᩮᩬᩥᨦ", "char"),
    ("ii", "ꆈꌠꁱꂷ", "char"), ("nan", "我是臺灣人。", "zh"), ("nan", "góa sī lâng", "13a"),
    ("ojp", "うちなー口", "char"), ("ain", "アイヌ・イタㇰ", "char"), ("am", "ሰላም ለዓለም", "13a"),
    ("xx", "one ខ្មែរ two", "13a"), ("xx", "", "13a"),
    ("vai", "ꕉ" * 30, "char"),  # a text without blanks that is this long is not one word
])  # fmt: skip
def test_the_tokenizer_of_bleu_for_an_unknown_language_follows_the_script(language, text, tokenizer, tmp_path):
    references = tmp_path / "test"
    references.write_text(f"{text}\n", encoding="utf-8")
    bleu = metrics.bleu.__wrapped__(language, references=references)
    assert bleu.tokenizer_signature == tokenizer


@pytest.mark.parametrize("kind, language, line", [
    ("bpe", "fr", "l@@ &apos; homme , &quot; a@@ m@@ i &quot; ! x@@"),
    ("bpe", "de", "Er sagt : &quot; Ja ! &quot; 3,5 % @-@ a"),
    ("sentencepiece", "th", "▁ที่ นี่ ▁มี"), ("sentencepiece", "en", "▁ a b ▁"),
])  # fmt: skip
def test_subwords_are_joined_as_fairseq_joins_them(kind, language, line, tmp_path):
    """The expected text is joined by fairseq's own classes, as fairseq-generate makes them from its flags."""
    (tmp_path / "codes").write_text("#version: 0.2\na b\n")
    flags = argparse.Namespace(
        bpe_codes=str(tmp_path / "codes"), bpe_separator="@@", source_lang="en", target_lang=language
    )
    if kind == "sentencepiece":
        expected = SentencepieceBPE.decode(None, line)
    else:
        words = SubwordNMTBPE(flags).decode(line)
        expected = FairseqMoses(flags).decode(words)
    assert languages.join_subwords(line, kind, language) == expected


def write_corpus(folder, language, ending="", form="NFC"):
    """Writes the page in English and another language: 190 pairs to train on, 10 to validate and 24 to test.

    The training set and the test set both have the four sentences with all letters.

    Args:
        folder: the folder to make, which is returned.
        language: a language of the page.
        ending: the ending of its files; by default the language.
        form: Unicode's normal form in which the text is written.
    """
    pairs = list(zip(sentences("en"), sentences(language)))
    other_pairs = pairs[:NUM_OTHER_SENTENCES]
    combinations = pairs[NUM_OTHER_SENTENCES:]
    random.Random(1).shuffle(combinations)
    splits = {
        "test": other_pairs + combinations[:20],
        "valid": combinations[20:30],
        "train": other_pairs + combinations[30:],
    }
    folder.mkdir(parents=True)
    for split, split_pairs in splits.items():
        english_sentences, translations = zip(*split_pairs)
        write_lines(folder / f"{split}.en", english_sentences, form)
        write_lines(folder / f"{split}.{ending or language}", translations, form)
    return folder


def write_lines(path, text_lines, form):
    """Writes lines to a file in one of Unicode's normal forms."""
    text = "".join(f"{line}\n" for line in text_lines)
    path.write_text(unicodedata.normalize(form, text), encoding="utf-8")


def append_text(path, text):
    """Adds text to the end of a file, as it is."""
    with open(path, "a", encoding="utf-8", newline="\n") as file:
        file.write(text)


@pytest.fixture
def prepare_page(programs_in_process, tmp_path, capsys):
    """Returns a function that prepares the page in English and a language."""

    def prepare_language(language, *options, ending="", more=("", ""), form="NFC"):
        """Returns the folder of the data, and the text that prepare.sh has printed.

        Args:
            language: a language of the page.
            options: options of prepare.sh.
            ending: the ending of the files in this language; by default the language.
            more: two texts for the end of the test set: in English, and in the language.
            form: Unicode's normal form in which the text is written.
        """
        ending = ending or language
        raw = write_corpus(tmp_path / "raw", language, ending, form)
        more_english, more_in_language = more
        append_text(raw / "test.en", more_english)
        append_text(raw / f"test.{ending}", more_in_language)
        data = tmp_path / "data"
        prepare.main([str(raw), "en", ending, str(data), "--workers", "1", *options])
        return data, capsys.readouterr().out

    return prepare_language


@pytest.mark.parametrize("language", LANGUAGES)
def test_text_comes_back_from_its_subwords(prepare_page, language):
    """Some languages are in lower case, and some in another form of Unicode. A tab and a line separator are spaces."""
    endings = {"ko": "ko_KR", "zh": "zh-Hans"}
    ending = endings.get(language, language)
    form = "NFD" if language in ("vi", "ko", "de") else "NFC"
    is_lowercase = language in ("tr", "ru")
    options = ["--lowercase"] if is_lowercase else []
    english_line = "a\tbook\u2028"
    line_in_language = "a\u00a0\u00a0book"
    more = (english_line, line_in_language)
    data, printed = prepare_page(language, *options, ending=ending, form=form, more=more)

    assert "\nround trip: BLEU 100.00, 25 of 25 lines\n" in printed
    assert "\nround trip of en: BLEU 100.00" in printed
    assert "warning" not in printed
    says_that_text_was_composed = "which are composed now (NFC)" in printed
    assert says_that_text_was_composed == (form == "NFD")
    settings = load(data / "settings.json")
    assert settings["round_trip"] == [100.0, 25, 25]
    if language in ("de", "fr", "ru"):
        assert settings["subwords"] == "bpe"
    else:
        assert settings["subwords"] == "sentencepiece"

    # The training text comes back, too.
    for side in ("en", ending):
        lines_of_subwords = lines(data / "sub" / f"train.{side}")
        joined_lines = [languages.join_subwords(line, settings["subwords"], side) for line in lines_of_subwords]
        assert joined_lines == list(lines(data / "text" / f"train.{side}"))

    expected_lines = [*sentences(language)[:NUM_OTHER_SENTENCES], "a book"]
    expected_lines = [unicodedata.normalize("NFC", line) for line in expected_lines]
    if is_lowercase:
        expected_lines = [languages.lower(line, language) for line in expected_lines]
    references = (data / f"test.{ending}").read_text(encoding="utf-8").splitlines()
    assert [*references[:NUM_OTHER_SENTENCES], references[-1]] == expected_lines


SYMBOLS = [
    "👨‍👩‍👧‍👦 👍🏽 🏳️‍🌈", "🏴󠁧󠁢󠁥󠁮󠁧󠁿 1️⃣ 🇩🇪 ©️ #️⃣",
    "12 m², x³ und 5½ ①", "𝐇𝐢 Hallo👍!", "за́мок Auf\u200clage 東京-Haus", "\ue000 ᐁm²",
]  # fmt: skip


def test_symbols_come_back_with_bpe(prepare_page):
    """Emoji, raised digits, joiners and accents stay in their words, in the data and in text to be translated."""
    text = "".join(f"{line}\n" for line in SYMBOLS)
    data, printed = prepare_page("de", "--merges", "60", more=(text, text))
    settings = load(data / "settings.json")
    assert settings["subwords"] == "bpe"
    assert settings["round_trip"] == [100.0, 30, 30]
    assert "warning" not in printed
    tokenized_lines = (data / "tok" / "test.de").read_text(encoding="utf-8").splitlines()
    lines_of_symbols = tokenized_lines[-len(SYMBOLS) :]
    assert lines_of_symbols[0] == SYMBOLS[0]
    subwords_of_symbols = list(lines(data / "sub" / "test.en"))[-len(SYMBOLS) :]
    assert translate.prepare_sentences(text, settings, data) == subwords_of_symbols


@pytest.mark.parametrize("language, options, more, cause", [
    ("de", ["--merges", "60"], "5°C ±3 a+b\n" * 9, r"here it changes text at °; --subwords sentencepiece"),
    ("th", ["--subwords", "bpe", "--merges", "60"], "", "Moses' tokeniser does not know th; --subwords sentencepiece"),
    ("de", ["--merges", "60"], "Er „sagt“ – „nichts“\n" * 9, "quotes and dashes plain, .*; --subwords sentencepiece"),
    ("de", ["--subwords", "sentencepiece", "--nfkc"], "½ ½ ½ ½ ½ ½ ½\n" * 9, "--nfkc changes characters"),
])  # fmt: skip
def test_text_that_does_not_come_back_is_reported(prepare_page, language, options, more, cause):
    """The report has the score of a perfect translation, the first line that differs, the cause, and what to do.

    `more` is text for the end of the test set, which does not come back.
    """
    num_lines = more.count("\n")
    data, printed = prepare_page(language, *options, more=("word\n" * num_lines, more))
    score, same, total = load(data / "settings.json")["round_trip"]
    assert score < checks.LEAST_BLEU
    assert same < total == NUM_TEST_SENTENCES + num_lines
    assert f"round trip: BLEU {score:.2f}, {same} of {total} lines\n  line " in printed
    assert f"warning: no translation can have more than BLEU {score:.2f}: " in printed
    assert re.search(cause, printed)


def test_characters_that_change_form_are_counted(prepare_page):
    """Letters that are composed, and single characters that Unicode's canonical form replaces, are counted apart."""
    _, printed = prepare_page("fr", more=("five ohm\n", "5 \u2126\n"), form="NFD")
    assert "pairs had letters with separate accents (NFD), which are composed now (NFC)" in printed
    assert "1 pairs had characters that Unicode's canonical form (NFC) replaces by others" in printed


def test_lines_that_are_cut_do_not_count_in_the_round_trip(prepare_page):
    """Such lines cannot come back, and a translation may be longer. If all lines are cut, nothing is counted."""
    options = ["--subwords", "sentencepiece", "--keep-end", "--truncate-source", "3", "--truncate-target", "9"]
    data, printed = prepare_page("de", *options, more=("book a\n", "usw.\n"))
    score, same, total = load(data / "settings.json")["round_trip"]
    num_lines = NUM_TEST_SENTENCES + 1
    assert score == 100
    assert 0 < same == total < num_lines
    assert f"; {num_lines - total} more are cut to 9 subwords" in printed
    assert f"round trip of en: nothing is left of it, as all {num_lines} lines are cut to 3 subwords" in printed


def test_a_test_line_that_shows_nothing_is_refused(prepare_page):
    def prepare_with_such_a_line(_argv):
        """Prepares the page with a character without width as the last English line of the test set."""
        prepare_page("de", more=("\u200b\n", "nichts\n"))

    assert_refused(prepare_with_such_a_line, part="line 25 .* is empty")


# settings of prepared data, as `translate.prepare_sentences` reads them
TURKISH_TO_ENGLISH = {
    "src": "tr",
    "tgt": "en",
    "lowercase": True,
    "subwords": "bpe",
    "dash-splits": None,
    "truncate-source": None,
}


@pytest.fixture
def single_letters(tmp_path):
    """Returns a folder of data whose subwords are single letters."""
    (tmp_path / "codes").write_text("#version: 0.2\nq q</w>\n")
    return tmp_path


def test_a_line_that_shows_nothing_is_translated_as_an_empty_line(single_letters):
    text = "\u200b\nIŞIK\tİ\u00ad\r\n\ufeff\u200c \n"
    prepared_lines = translate.prepare_sentences(text, TURKISH_TO_ENGLISH, single_letters)
    assert [languages.without_bpe(line) for line in prepared_lines] == ["", "ışık i", ""]


def test_constraints_are_prepared_as_text_of_the_target_language(single_letters):
    text = "IŞIK Ğ\tI\u00a0see\tAuto\n"
    (line,) = translate.prepare_sentences(text, TURKISH_TO_ENGLISH, single_letters, has_constraints=True)
    assert [languages.without_bpe(part) for part in line.split("\t")] == ["ışık ğ", "i see", "auto"]


@pytest.mark.ci
@pytest.mark.slow
def test_any_locale(programs_in_process, tmp_path):
    """The scripts, and the programs that they call, read and write UTF-8 even if the locale has ASCII alone.

    Python reads the locale when it starts, so that ten new processes import torch, fairseq or sacremoses here.
    """
    raw = write_corpus(tmp_path / "raw", "ru")
    data = tmp_path / "data"
    run = tmp_path / "run"

    process = run_script("prepare.sh", raw, "en", "ru", data, env=ASCII_LOCALE, encoding="utf-8")
    assert process.returncode == 0, process.stderr
    assert f"{data} is ready" in process.stdout

    # A training reads only the numbers of words, so it may run in this process.
    train.main([str(data), "random_vanilla", "--save-dir", str(run), *TRAINING])
    process = run_script("evaluate.sh", run, "--average", 0, "--beam", 1, env=ASCII_LOCALE, encoding="utf-8")
    assert process.returncode == 0, process.stderr
    assert f"reference: {sentences('ru')[0]}\n" in process.stdout
    figures = load(run / "evaluation" / "scores.json")["figures"]
    assert figures["round_trip"]["score"] == 100
    assert "24 of 24" in figures["round_trip"]["signature"]
    assert {"bleu", "chrf", "tokenised"} < set(figures)
    assert figures["bleu"]["signature"].count("tok:") == 1

    text = "“ľuboš” мой брат\n\u200b\n"
    process = run_script("translate.sh", run, "--beam", 1, env=ASCII_LOCALE, input=text, encoding="utf-8")
    assert process.returncode == 0, process.stderr
    assert len(process.stdout.splitlines()) == 2
