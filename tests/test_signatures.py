"LAWS 41: public names and their parameters change on purpose only; tests/signatures.txt has the last commit's."
import difflib

import signatures


def test_public_signatures_are_those_of_the_snapshot():
    then, now = signatures.FILE.read_text(encoding="utf-8"), signatures.render()
    changes = [line for line in difflib.unified_diff(then.splitlines(), now.splitlines(), lineterm="", n=0)
               if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    rule = ("A new name or keyword: python tests/signatures.py. One that is gone or renamed: it stays for a minor "
            "version with a DeprecationWarning (CONTRIBUTING.md, Names and versions).")
    assert not changes, f"public signatures have changed. {rule}\n" + "\n".join(changes)


def test_the_snapshot_has_every_name_that_the_package_offers():
    import rlblocks
    assert {line.partition("(")[0].partition(".")[0]
            for line in signatures.FILE.read_text(encoding="utf-8").splitlines()} == {*rlblocks.__all__}
