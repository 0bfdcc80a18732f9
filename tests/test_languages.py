"""Text of many languages: it comes back as it went in, is scored by its language's rules, in any locale."""

import argparse
import random
import re
import unicodedata

import pytest
import yaml
from fairseq.data.encoders.moses_tokenizer import MosesTokenizer as FairseqMoses
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE
from fairseq.data.encoders.subword_nmt_bpe import SubwordNMTBPE
from helpers import assert_refused, run_script
from small_text import sizes

from recipes import checks, languages, metrics, prepare, train, translate
from recipes.steps import ROOT, as_arguments, load
from recipes.text import lines

PAGE = yaml.safe_load((ROOT / "tests" / "sentences.yaml").read_text(encoding="utf-8"))
LANGUAGES = [language for language in PAGE if language != "en"]
# an update or two of a small model
TRAINING = [*"--max-update 2 --save-every 2 -- --validate-interval-updates 2 --data-buffer-size 0".split()]
TRAINING += as_arguments(sizes("encoder", "decoder"))
HOSTILE = {"LC_ALL": "C", "LANG": "", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "latin-1"}


def sentences(language):
    """All that the page makes: the same number of lines for each language, translations of each other."""
    page = PAGE[language]
    parts = [{"who": a, "what": b, "where": c} for a in page["who"] for b in page["what"] for c in page["where"]]
    return page["others"] + [page["form"].format(**part) for part in parts]


@pytest.mark.parametrize("text, wanted", [
    # spaces of all kinds, and ends of lines, are blanks; several are one
    ("a\tb", "a b"), ("a\u00a0!", "a !"), ("a\u202f:", "a :"), ("a\u3000b", "a b"), ("a\u2009b", "a b"),
    ("a\u2028b\u2029c", "a b c"), ("a\x85b\x0bc\x0cd\x1ce\x1ff", "a b c d e f"), ("a\rb\r", "a b"), ("  a  b ", "a b"),
    ("a\u2581b", "a b"),
    # what has no width, and control characters, are nothing
    ("\ufeffa\u200bb\u2060c\u00add", "abcd"), ("a\x00b\x07c\x1bd\x7fe", "abcde"),
    ("a\u200eb\u200fc\u202ad\u2066e", "abcde"),
    # punctuation of Windows-1252
    ("don\x92t \x93so\x94 \x96 \x80", "don’t “so” – €"), ("a\x81b", "ab"),
    # letters are composed, also where something hidden stood between
    ("cafe\u0301", "café"), ("e\u200b\u0301", "é"), ("\u1112\u1161\u11ab", "한"),
    # and all else stays: joiners, full-width letters, ligatures, Thai's am, selectors, what has no composed form
    *[(text, text) for text in ("می‌خواند", "शक्\u200dति", "３．５０％，ｱﾞ", "ﬁ½…²㈱", "น้ำ", "❤\ufe0f", "👩\u200d🚀",
        "क\u093c", "ß ẞ", "�")],
    # signs without width that belong to the spelling: of Mongolian vowels, of the order of marks
    ("ᠪᠠᠭ\u180eᠠ", "ᠪᠠᠭ\u180eᠠ"), ("ᠮᠣᠩᠭᠣᠯ\u180b", "ᠮᠣᠩᠭᠣᠯ\u180b"), ("a\u034fb", "a\u034fb"),
    # and ends of words where a script has no blanks, once
    ("ភាសា\u200bខ្មែរ", "ភាសា\u200bខ្មែរ"), ("ไทย\u200b\u200bลาว\u200b 1\u200b2", "ไทย\u200bลาว 12"),
    ("ꦗ\u200bꦮ", "ꦗ\u200bꦮ"), ("မြန်\u200bUK", "မြန်\u200bUK"),
    # names are written with these variants of Chinese characters, which normal forms would replace
    ("神福逸 \U0002f800e\u0301", "神福逸 \U0002f800é"),
    # signs that look like letters, and are written as those
    ("5 \u2126, 3 \u212b", "5 Ω, 3 Å"),
    # a line that shows nothing is empty
    *[(text, "") for text in ("\u200b", "\ufeff", "\u200c", " \u200d\u00a0", "\u00ad\u2060", "\x07", "\u3164",
        "\u2800", "\ufe0f", "\u180b", "")],
])  # fmt: skip
def test_what_becomes_of_characters(text, wanted):
    assert languages.one_line(text) == wanted
    assert languages.one_line(wanted) == wanted  # a second time changes nothing


def test_every_character_stays_or_is_in_the_table():
    """All that Unicode has, but for what the table of docs/languages.md names."""
    for code in (*range(0x21, 0xD800), *range(0xE000, 0x30000)):
        found = languages.one_line(f"a{chr(code)}b")
        if unicodedata.name(chr(code), "").startswith("CJK COMPATIBILITY IDEOGRAPH"):
            assert found == f"a{chr(code)}b", hex(code)
        elif chr(code) not in languages.TABLE:
            assert found == unicodedata.normalize("NFC", f"a{chr(code)}b"), hex(code)
        assert len(found.split(" ")) == 1 + (" " in languages.TABLE.get(chr(code), "")), hex(code)  # as fairseq divides


@pytest.mark.parametrize("text, language, wanted", [
    ("ISPARTA İZMİR", "tr", "ısparta izmir"), ("IĞDIR", "az", "ığdır"), ("DIŞ", "tur_Latn", "dış"),
    ("İZMİR I", "en", "izmir i"),
    ("Straße STRASSE ẞ", "de", "straße strasse ß"), ("ΟΔΟΣ", "el", "οδος"), ("İ", "tr", "i"),
    # other languages with two letters i, in the Latin alphabet
    *[("KIRIM QIRIM İT", language, "kırım qırım it")
      for language in ("crh_Latn", "crh", "gag", "tt_Latn", "kaz_Latn", "kk", "zza", "azb-Latn")],
    ("Қазақ тілінде IBM", "kk", "қазақ тілінде ibm"), ("IBM", "kk_Cyrl", "ibm"), ("IBM", "uz_Latn", "ibm"),
    ("J̃ Į́ Ì Š I", "lt", "j̇̃ į̇́ i̇̀ š i"), ("J̃ Ì", "en", "j̃ ì"),
])  # fmt: skip
def test_lower(text, language, wanted):
    assert languages.lower(unicodedata.normalize("NFC", text), language) == unicodedata.normalize("NFC", wanted)


def test_lower_case_keeps_variants_of_chinese_characters():
    assert languages.lower("神田 A", "ja") == languages.lower("神田 A", "lt") == "神田 a"


@pytest.mark.parametrize("pair, kind", [
    ("en de", "bpe"), ("fr en", "bpe"), ("en ru", "bpe"), ("en th", "sentencepiece"), ("zh_CN en", "sentencepiece"),
    ("en tr", "sentencepiece"), ("hi en", "sentencepiece"), ("en de_AT", "sentencepiece"),
])  # fmt: skip
def test_default_subwords(pair, kind, dry_run, tmp_path):
    settings = prepare.prepare("own", pair.split(), tmp_path, None, {"like": None})
    assert settings["subwords"] == kind


@pytest.mark.parametrize("language, tokenizer", [
    ("de", "13a"), ("zh_CN", "zh"), ("zho-Hans", "zh"), ("yue", "zh"), ("th", "char"), ("my_MM", "char"), ("fa", "13a"),
    ("JA", "ja-mecab"), ("kor_Hang", "ko-mecab"), ("zho_Hant", "zh"), ("yue_Hant", "zh"), ("lzh", "zh"),
    ("nan-Hant", "zh"), ("shn_Mymr", "char"), ("dzo_Tibt", "char"), ("jv-Java", "char"), ("ryu_Jpan", "char"),
    ("khb_Talu", "char"), ("jv_Latn", "13a"), ("en_news", "13a"),
])  # fmt: skip
def test_bleu_of_a_language(language, tokenizer, monkeypatch, capsys):
    """Where the package of a tokeniser is not there, BLEU counts characters, and says which package counts words."""
    for name in ("ja", "ko"):
        monkeypatch.setattr(f"sacrebleu.tokenizers.tokenizer_{name}_mecab.MeCab", None)
    needs = "mecab" in tokenizer
    assert metrics.bleu.__wrapped__(language).tokenizer_signature == ("char" if needs else tokenizer)
    assert (f'({tokenizer}): pip install "sacrebleu[{tokenizer[:2]}]"' in capsys.readouterr().out) == needs


@pytest.mark.parametrize("language, text, tokenizer", [
    ("shn", "မႂ်ႇသုင်ၶႃႈ", "char"), ("mnw", "ဘာသာမန်", "char"), ("nod", "ᨣᩤᩴᨾᩮᩬᩥᨦ", "char"),
    ("ii", "ꆈꌠꁱꂷ", "char"), ("nan", "我是臺灣人。", "zh"), ("nan", "góa sī lâng", "13a"),
    ("ojp", "うちなー口", "char"), ("ain", "アイヌ・イタㇰ", "char"), ("am", "ሰላም ለዓለም", "13a"),
    ("xx", "one ខ្មែរ two", "13a"), ("xx", "", "13a"),
    ("vai", "ꕉ" * 30, "char"),  # words that long are none
])  # fmt: skip
def test_bleu_of_a_language_that_is_not_known_follows_the_script(language, text, tokenizer, tmp_path):
    (tmp_path / "test").write_text(f"{text}\n", encoding="utf-8")
    assert metrics.bleu.__wrapped__(language, references=tmp_path / "test").tokenizer_signature == tokenizer


@pytest.mark.parametrize("kind, language, line", [
    ("bpe", "fr", "l@@ &apos; homme , &quot; a@@ m@@ i &quot; ! x@@"),
    ("bpe", "de", "Er sagt : &quot; Ja ! &quot; 3,5 % @-@ a"),
    ("sentencepiece", "th", "▁ที่ นี่ ▁มี"), ("sentencepiece", "en", "▁ a b ▁"),
])  # fmt: skip
def test_undone_as_fairseq_does(kind, language, line, tmp_path):
    """fairseq's own subwords and tokeniser, as fairseq-generate makes them of their flags."""
    (tmp_path / "codes").write_text("#version: 0.2\na b\n")
    flags = argparse.Namespace(bpe_codes=str(tmp_path / "codes"), bpe_separator="@@", target_lang=language)
    flags.source_lang = "en"
    if kind == "sentencepiece":
        wanted = SentencepieceBPE.decode(None, line)
    else:
        wanted = FairseqMoses(flags).decode(SubwordNMTBPE(flags).decode(line))
    assert languages.undone(line, kind, language) == wanted


def write_corpus(folder, language, ending="", form="NFC"):
    """English and another language: 190 pairs to train on, with all letters, 10 to validate, 24 to test."""
    rows = list(zip(sentences("en"), sentences(language)))
    others, rows = rows[:4], rows[4:]
    random.Random(1).shuffle(rows)
    folder.mkdir(parents=True)
    for split, some in (("test", others + rows[:20]), ("valid", rows[20:30]), ("train", others + rows[30:])):
        for side, end in enumerate(("en", ending or language)):
            text = unicodedata.normalize(form, "".join(f"{row[side]}\n" for row in some))
            (folder / f"{split}.{end}").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def prepared(programs_in_process, tmp_path, capsys):
    """Prepares the page of a language, with further lines behind its test set: the folder, and what is printed."""

    def made(language, *options, ending="", more=("", ""), form="NFC"):
        raw, ending = write_corpus(tmp_path / "raw", language, ending, form), ending or language
        for side, text in zip(("en", ending), more):
            with open(raw / f"test.{side}", "a", encoding="utf-8", newline="\n") as file:
                file.write(text)
        prepare.main([str(raw), "en", ending, str(tmp_path / "data"), "--workers", "1", *options])
        return tmp_path / "data", capsys.readouterr().out

    return made


@pytest.mark.parametrize("language", LANGUAGES)
def test_text_comes_back(prepared, language):
    """By default, in small letters or in whatever form of Unicode it is; tabs, too, and a separator of lines."""
    ending = {"ko": "ko_KR", "zh": "zh-Hans"}.get(language, language)
    form, small = "NFD" if language in ("vi", "ko", "de") else "NFC", language in ("tr", "ru")
    more = {"ending": ending, "form": form, "more": ("a\tbook\u2028", "a\u00a0\u00a0book")}
    data, said = prepared(language, *["--lowercase"] * small, **more)
    assert "\nround trip: BLEU 100.00, 25 of 25 lines\n" in said and "\nround trip of en: BLEU 100.00" in said
    assert "warning" not in said and ("they are composed now (NFC)" in said) == (form == "NFD")
    settings = load(data / "settings.json")
    assert settings["round_trip"] == [100.0, 25, 25]
    assert settings["subwords"] == ("bpe" if language in ("de", "fr", "ru") else "sentencepiece")
    for side in ("en", ending):  # what is trained on, too
        found = [languages.undone(line, settings["subwords"], side) for line in lines(data / "sub" / f"train.{side}")]
        assert found == [*lines(data / "text" / f"train.{side}")]
    wanted = [unicodedata.normalize("NFC", line) for line in (*sentences(language)[:4], "a book")]
    found = (data / f"test.{ending}").read_text(encoding="utf-8").splitlines()
    assert [*found[:4], found[-1]] == [languages.lower(line, language) if small else line for line in wanted]


SYMBOLS = [
    "👨‍👩‍👧‍👦 👍🏽 🏳️‍🌈", "🏴󠁧󠁢󠁥󠁮󠁧󠁿 1️⃣ 🇩🇪 ©️ #️⃣",
    "12 m², x³ und 5½ ①", "𝐇𝐢 Hallo👍!", "за́мок Auf\u200clage 東京-Haus", "\ue000 ᐁm²",
]  # fmt: skip


def test_symbols_come_back_with_bpe(prepared):
    """Emoji, raised digits, joiners and accents stay in their words, in data and in what is translated."""
    text = "".join(f"{line}\n" for line in SYMBOLS)
    data, said = prepared("de", "--merges", "60", more=(text, text))
    settings = load(data / "settings.json")
    assert settings["subwords"] == "bpe" and settings["round_trip"] == [100.0, 30, 30] and "warning" not in said
    assert (data / "tok" / "test.de").read_text(encoding="utf-8").splitlines()[-6] == SYMBOLS[0]
    assert translate.as_prepared(text, settings, data) == [*lines(data / "sub" / "test.en")][-6:]


@pytest.mark.parametrize("language, options, more, cause", [
    ("de", ["--merges", "60"], "5°C ±3 a+b\n" * 9, r"here it changes text at °; --subwords sentencepiece"),
    ("th", ["--subwords", "bpe", "--merges", "60"], "", "Moses' tokeniser does not know th; --subwords sentencepiece"),
    ("de", ["--merges", "60"], "Er „sagt“ – „nichts“\n" * 9, "quotes and dashes plain, .*; --subwords sentencepiece"),
    ("de", ["--subwords", "sentencepiece", "--nfkc"], "½ ½ ½ ½ ½ ½ ½\n" * 9, "--nfkc makes letters alike"),
])  # fmt: skip
def test_text_that_does_not_come_back(prepared, language, options, more, cause):
    """What a perfect translation would have is said, with the first line that differs, the cause and the mend."""
    data, said = prepared(language, *options, more=("word\n" * more.count("\n"), more))
    score, same, total = load(data / "settings.json")["round_trip"]
    assert score < checks.LEAST_BLEU and same < total == 24 + more.count("\n")
    assert f"round trip: BLEU {score:.2f}, {same} of {total} lines\n  line " in said
    assert f"warning: no translation can have more than BLEU {score:.2f}: " in said and re.search(cause, said)


def test_characters_that_change_form_are_counted(prepared):
    """Composed accents, and single characters that Unicode's canonical form replaces, each by their own name."""
    _, said = prepared("fr", more=("five ohm\n", "5 \u2126\n"), form="NFD")
    assert "pairs had letters and accents apart (NFD); they are composed now (NFC)" in said
    assert "1 pairs had characters that Unicode's canonical form (NFC) replaces by others" in said


def test_lines_that_are_cut(prepared):
    """They cannot come back, and translations may be longer: they are left out. If all are, nothing is counted."""
    cut = ["--subwords", "sentencepiece", "--keep-end", "--truncate-source", "3", "--truncate-target"]
    data, said = prepared("de", *cut, "9", more=("book a\n", "usw.\n"))
    score, same, total = load(data / "settings.json")["round_trip"]
    assert score == 100 and 0 < same == total < 25 and f"; {25 - total} more are cut to 9 subwords" in said
    assert "round trip of en: nothing is left of it, as all 25 lines are cut to 3 subwords" in said


def test_lines_that_show_nothing(prepared, tmp_path):
    """They are left out where text is trained on, refused in a test set, and translated as empty lines."""
    assert_refused(lambda _: prepared("de", more=("\u200b\n", "nichts\n")), part="line 25 .* is empty")
    settings = {"src": "tr", "tgt": "en", "lowercase": True, "subwords": "bpe"}
    settings |= {"dash-splits": None, "truncate-source": None}
    (tmp_path / "codes").write_text("#version: 0.2\nq q</w>\n")  # single letters
    given = translate.as_prepared("\u200b\nIŞIK\tİ\u00ad\r\n\ufeff\u200c \n", settings, tmp_path)
    assert [languages.without_bpe(line) for line in given] == ["", "ışık i", ""]
    # a text that a translation must have (--constraints) is prepared by itself, as its own language's
    (given,) = translate.as_prepared("IŞIK Ğ\tI\u00a0see\tAuto\n", settings, tmp_path, True)
    assert [languages.without_bpe(part) for part in given.split("\t")] == ["ışık ğ", "i see", "auto"]


@pytest.mark.slow
def test_any_locale(programs_in_process, tmp_path):
    """The whole way: commands, and programs that they call, read and write UTF-8 where the locale has ASCII alone."""
    raw, data, run = write_corpus(tmp_path / "raw", "ru"), tmp_path / "data", tmp_path / "run"
    done = run_script("prepare.sh", raw, "en", "ru", data, env=HOSTILE, encoding="utf-8")
    assert done.returncode == 0 and f"{data} is ready" in done.stdout, done.stderr
    train.main([str(data), "random_vanilla", "--save-dir", str(run), *TRAINING])  # which reads numbers of words alone
    done = run_script("evaluate.sh", run, "--average", 0, "--beam", 1, env=HOSTILE, encoding="utf-8")
    assert done.returncode == 0 and f"reference: {sentences('ru')[0]}\n" in done.stdout, done.stderr
    figures = load(run / "evaluation" / "scores.json")["figures"]
    assert figures["round_trip"]["score"] == 100 and "24 of 24" in figures["round_trip"]["signature"]
    assert {"bleu", "chrf", "tokenised"} < {*figures} and figures["bleu"]["signature"].count("tok:") == 1
    given = "“ľuboš” мой брат\n\u200b\n"
    done = run_script("translate.sh", run, "--beam", 1, env=HOSTILE, input=given, encoding="utf-8")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2, done.stderr
