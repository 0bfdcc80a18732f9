"""IWSLT14, by a small archive with the layout of the real one."""

import tarfile

import pytest
from helpers import assert_refused
from small_text import write

from recipes import prepare, talks, text

SETS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
# tags at the beginning of a talk; the real files, too, have other tags in English than in German
TAGS = {
    "de": ["<url>http://x</url>", "<keywords>a, b</keywords>"],
    "en": ["<url>http://x</url>", "<speaker>X</speaker>"],
}


@pytest.fixture
def archive(tmp_path):
    """Returns a folder with de-en.tgz: two talks of 30 sentences for training, and two sentences in each other file.

    The English training file begins with these lines. The other talk is named B, and has the same talkid:

        <url>http://x</url>
        <speaker>X</speaker>
        <talkid>1</talkid>
        <title>Title A</title>
        <description>this is Sentence of A</description>
         this is Sentence A 0
         this is Sentence A 1

    The other files have sentences such as "this is Sentence & TED.dev2010 1" in XML.
    """
    folder = tmp_path / "de-en"
    for language, words in (("de", "das ist Satz"), ("en", "this is Sentence")):
        lines = []
        for talk in ("A", "B"):
            lines += TAGS[language]  # their kinds differ between the languages
            lines.append("<talkid>1</talkid>")
            lines.append(f"<title>Title {talk}</title>")
            lines.append(f"<description>{words} of {talk}</description>")
            for number in range(30):
                lines.append(f" {words} {talk} {number} ")
        write(folder / f"train.tags.de-en.{language}", lines)
        for name in SETS:
            segments = [f'<seg id="{number}"> {words} &amp; {name} {number} </seg>' for number in (1, 2)]
            xml = [
                '<?xml version="1.0" encoding="UTF-8"?>',
                "<mteval>",
                f"<title>{name}</title>",
                *segments,
                "</mteval>",
            ]
            write(folder / f"IWSLT14.{name}.de-en.{language}.xml", xml)
    (tmp_path / "from").mkdir()
    with tarfile.open(tmp_path / "from" / "de-en.tgz", "w:gz") as file:
        file.add(folder, arcname="de-en")
    return tmp_path / "from"


def test_sentences_are_divided_as_fairseq_divides_them(archive, tmp_path):
    """Every 23rd line of the training text is for validation. All other files together are the test set.

    The training text has 64 lines: of each of the talks A and B the title, the description and 30 sentences, which are
    numbered from 0. The test set has two sentences of each of the `SETS`, such as "this is Sentence & TED.dev2010 1".
    """
    for side in ("de", "en"):
        folder = archive.parent / "de-en"
        files = {"train": [folder / f"train.tags.de-en.{side}"]}
        files["test"] = [folder / f"IWSLT14.{name}.de-en.{side}.xml" for name in SETS]
        talks.write_talks(files, tmp_path / "raw", side)
    sentences = {name: list(text.lines(tmp_path / "raw" / name)) for name in ("train.en", "valid.en", "test.en")}
    assert sentences["train.en"][:3] == ["Title A", "this is Sentence of A", "this is Sentence A 0"]
    # The 23rd line is the 21st sentence of A. The 46th line is the 14th of B, its 12th sentence.
    assert sentences["valid.en"] == ["this is Sentence A 20", "this is Sentence B 11"]
    assert len(sentences["train.en"]) == 62  # 64 lines without the two of the validation set

    test_sentences = sentences["test.en"]
    assert test_sentences[:2] == ["this is Sentence & TED.dev2010 1", "this is Sentence & TED.dev2010 2"]
    first_sentence_of_each_set = test_sentences[::2]
    names_of_sets = [sentence.split()[-2] for sentence in first_sentence_of_each_set]
    assert names_of_sets == list(SETS)

    # Line by line, the German sentences are the translations of the English ones.
    for split in ("train", "valid", "test"):
        german_sentences = list(text.lines(tmp_path / "raw" / f"{split}.de"))
        expected_sentences = []
        for english_sentence in sentences[f"{split}.en"]:
            expected_sentences.append(english_sentence.replace("this is Sentence", "das ist Satz"))
        assert german_sentences == expected_sentences


@pytest.mark.usefixtures("programs_in_process")
def test_the_archive_is_prepared(archive, tmp_path, capsys):
    out = tmp_path / "out"
    prepare.main(["iwslt14", str(out), "--from", str(archive), "--merges", "60"])
    assert "62 pairs" in capsys.readouterr().out
    assert list(text.lines(out / "test.en"))[0] == "this is sentence & ted.dev2010 1"
    assert (out / "bin" / "dict.de.txt").exists()
    assert_refused(prepare.main, "iwslt14", "de", out, part="give DIR SRC TGT OUT_DIR, or a corpus and OUT_DIR")
