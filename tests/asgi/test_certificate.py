"""A port's certificate: what is wrong with its files in one sentence, and files that change."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest

from kvmig.asgi.certificate import CertificateWatch, load_certificate
from kvmig.core.config import CertificateFiles
from kvmig.core.errors import ConfigError
from tests.support.certificates import Authority

DAY = timedelta(days=1)


def refused(files: CertificateFiles, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as said:
        load_certificate(files)
    assert "\n" not in str(said.value)


def test_a_certificate_is_loaded_with_the_time_when_it_expires(tmp_path: Path) -> None:
    files = Authority.make().write(tmp_path)
    found = load_certificate(files)
    assert found.expires == pytest.approx(time.time() + 86400, abs=60)
    assert found.context.minimum_version.name == "TLSv1_2"


def test_files_that_are_not_there_are_refused_by_name(tmp_path: Path) -> None:
    files = Authority.make().write(tmp_path)
    Path(files.key).unlink()
    refused(files, r"--tls-key is '.*door\.key', must be a file that can be read: No such file")
    Path(files.cert).unlink()
    refused(files, r"--tls-cert is '.*door\.pem', must be a file that can be read: No such file")
    refused(CertificateFiles(str(tmp_path), files.key), r"--tls-cert is .*: Is a directory")


def test_files_of_another_kind_are_refused_by_name(tmp_path: Path) -> None:
    files = Authority.make().write(tmp_path)
    refused(
        CertificateFiles(files.key, files.key), "--tls-cert is .*, must be a certificate in PEM"
    )
    refused(
        CertificateFiles(files.cert, files.cert), "--tls-key is .*, must be a private key in PEM"
    )
    Path(files.cert).write_bytes(b"")
    refused(files, "--tls-cert is .*, must be a certificate in PEM")


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    authority = Authority.make()
    one, other = authority.write(tmp_path), authority.write(tmp_path, "other")
    refused(
        CertificateFiles(one.cert, other.key),
        r"--tls-key is '.*other\.key', the key of another certificate than '.*door\.pem'",
    )


def test_a_key_with_a_password_is_refused(tmp_path: Path) -> None:
    files = Authority.make().write(tmp_path, password=b"secret")
    refused(files, "--tls-key is .*, a key with a password; must be one without")


def test_a_certificate_that_is_not_valid_now_is_refused_with_the_time(tmp_path: Path) -> None:
    authority = Authority.make()
    refused(
        authority.write(tmp_path, begins=-2 * DAY, ends=-DAY),
        r"--tls-cert is .*, which expired at \d{4}-\d\d-\d\d \d\d:\d\d UTC; must be valid now",
    )
    refused(
        authority.write(tmp_path, begins=DAY, ends=2 * DAY), "which is valid from .* on; must be"
    )


# -- files that change


def test_a_new_certificate_is_taken_once_both_files_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, other = Authority.make(), tmp_path / "new"
    other.mkdir()
    files = authority.write(tmp_path)
    watch = CertificateWatch(files)
    first = watch.certificate
    watch.read_again()
    assert watch.certificate is first
    new = authority.write(other, ends=5 * DAY)
    Path(new.cert).replace(files.cert)
    for _ in range(3):
        watch.read_again()
    assert watch.certificate is first
    (warning,) = caplog.messages
    assert warning.startswith("the certificate from before stays in use: --tls-key is ")
    Path(new.key).replace(files.key)
    watch.read_again()
    assert watch.certificate.expires > first.expires


def test_a_certificate_that_vanishes_stays_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Authority.make().write(tmp_path)
    watch = CertificateWatch(files)
    first = watch.certificate
    Path(files.cert).unlink()
    watch.read_again()
    assert watch.certificate is first
    assert "No such file" in caplog.text
