"""IWSLT14, by a small archive with the layout of the real one."""

import tarfile

import pytest
from helpers import (
    assert_refused,
)
from small_text import write

from recipes import prepare, talks, text

SETS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
TAGS = {
    "de": ["<url>http://x</url>", "<keywords>a, b</keywords>"],
    "en": ["<url>http://x</url>", "<speaker>X</speaker>"],
}


@pytest.fixture
def archive(tmp_path):
    """A folder with de-en.tgz: two talks of 30 sentences for training, and two sentences in each other file."""
    folder = tmp_path / "de-en"
    for language, words in (("de", "das ist Satz"), ("en", "this is Sentence")):
        lines = []
        for talk in ("A", "B"):
            # the metadata differ in number between the languages; titles and descriptions do not
            lines += [*TAGS[language], "<talkid>1</talkid>", f"<title>Title {talk}</title>"]
            lines += [f"<description>{words} of {talk}</description>", *(f" {words} {talk} {i} " for i in range(30))]
        write(folder / f"train.tags.de-en.{language}", lines)
        for name in SETS:
            segments = [f'<seg id="{i}"> {words} &amp; {name} {i} </seg>' for i in (1, 2)]
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
    for side in ("de", "en"):
        folder = archive.parent / "de-en"
        files = {"train": [folder / f"train.tags.de-en.{side}"]}
        files["test"] = [folder / f"IWSLT14.{name}.de-en.{side}.xml" for name in SETS]
        talks.write_talks(files, tmp_path / "raw", side)
    sentences = {name: list(text.lines(tmp_path / "raw" / name)) for name in ("train.en", "valid.en", "test.en")}
    assert sentences["train.en"][:3] == ["Title A", "this is Sentence of A", "this is Sentence A 0"]
    assert sentences["valid.en"] == ["this is Sentence A 20", "this is Sentence B 11"]  # the 23rd and the 46th line
    assert len(sentences["train.en"]) == 62
    assert sentences["test.en"][:2] == [f"this is Sentence & TED.dev2010 {i}" for i in (1, 2)]
    assert [line.split()[-2] for line in sentences["test.en"][::2]] == list(SETS)
    for split in ("train", "valid", "test"):  # the languages stay side by side
        german = list(text.lines(tmp_path / "raw" / f"{split}.de"))
        english = [line.replace("this is Sentence", "das ist Satz") for line in sentences[f"{split}.en"]]
        assert german == english


@pytest.mark.usefixtures("programs_in_process")
def test_the_archive_is_prepared(archive, tmp_path, capsys):
    out = tmp_path / "out"
    prepare.main(["iwslt14", str(out), "--from", str(archive), "--merges", "60"])
    assert "62 pairs" in capsys.readouterr().out
    assert list(text.lines(out / "test.en"))[0] == "this is sentence & ted.dev2010 1"
    assert (out / "bin" / "dict.de.txt").exists()
    assert_refused(prepare.main, "iwslt14", "de", out, part="give DIR SRC TGT OUT_DIR, or a corpus and OUT_DIR")
