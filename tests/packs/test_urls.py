"""URLs of payload stores: normalization, refusal of invalid ones, and client configuration."""

from __future__ import annotations

import sys
from uuid import uuid4

import pytest

from replaydb import InvalidURLError, NotSupportedError
from replaydb.packs import PayloadStore

STORE = uuid4().hex
KEY = "hunter2"


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("file:///nvme/replay", "file:///nvme/replay"),
        ("file:///nvme//replay/./", "file:///nvme/replay"),
        ("file://localhost/nvme/re%20play", "file:///nvme/re%20play"),
        ("S3://bucket", "s3://bucket"),
        ("s3://bucket/a//b/", "s3://bucket/a/b"),
        (
            "s3://bucket/a?region=eu-west-1&endpoint=http://127.0.0.1:8333",
            "s3://bucket/a?endpoint=http://127.0.0.1:8333&region=eu-west-1",
        ),
        ("s3://bucket/a?virtual_hosted_style=true", "s3://bucket/a?virtual_hosted_style=true"),
        ("gs://bucket/a", "gs://bucket/a"),
        ("az://container/a?account=mine", "az://container/a?account=mine"),
    ],
)
def test_urls_are_normalized(given: str, canonical: str) -> None:
    assert PayloadStore(given, STORE).url == canonical
    assert PayloadStore(canonical, STORE).url == canonical


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "replay",
            "/nvme/replay",
            "file:replay",
            "file://nvme/replay",
            "file:////nvme/replay",
        ),
        *("file:///nvme/../replay", "file:///nvme/%00", "file:///nvme?sync=1", "file:///nvme#"),
        *("ftp://bucket/a", "s3:bucket", "s3://", "s3:///a", "s3://b/a", "s3://bucket/a/../b"),
        *("s3://bucket/a%2F..", "s3://bucket/ä", "s3://bucket\n/a", "s3://bucket:80/a"),
        *("s3://bucket/a?region", "s3://bucket/a?region=", "s3://bucket/a?region=x&region=y"),
        *("s3://bucket/a?endpoint=host:80", "s3://bucket/a?endpoint=http://h/?a=b"),
        *("s3://bucket/a?virtual_hosted_style=1", "gs://bucket/a?region=x", "az://cont/a?region=x"),
    ],
)
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidURLError) as raised:
        PayloadStore(url, STORE)
    assert raised.value.field == "payloads"


@pytest.mark.parametrize(
    "url",
    [
        f"s3://me:{KEY}@bucket/a",
        f"s3://{KEY}@bucket/a",
        f"s3://bucket/a?secret_access_key={KEY}",
        f"s3://bucket/a?{KEY}=x",
        f"s3://bucket/a?endpoint=http://me:{KEY}@host",
        f"s3://bucket/a?region={KEY}%20x",
        f"az://container/a?account=mine&sas_token={KEY}",
        f"gs://bucket/a?service_account_key={KEY}",
        f"file://me:{KEY}@/nvme",
        f"s3://bucket/a#{KEY}",
        f"{KEY}://bucket",
    ],
)
def test_a_url_with_a_key_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidURLError) as raised:
        PayloadStore(url, STORE)
    assert KEY not in repr(raised.value)
    assert raised.value.__context__ is None


def test_the_error_for_a_user_names_the_source_of_credentials() -> None:
    with pytest.raises(InvalidURLError, match="credentials come from the environment"):
        PayloadStore("s3://me@bucket/a", STORE)


def test_an_account_is_needed_for_azure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(InvalidURLError, match="account=NAME"):
        PayloadStore("az://container/a", STORE)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "mine")
    assert PayloadStore("az://container/a", STORE).url == "az://container/a"


def test_object_stores_need_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(NotSupportedError, match=r"replaydb\[obstore\]"):
        PayloadStore("s3://bucket/a", STORE)
    PayloadStore("file:///nvme", STORE)


@pytest.mark.parametrize(
    ("url", "kind", "config"),
    [
        (
            "s3://bucket/a?endpoint=https://host&region=eu-west-1&virtual_hosted_style=true",
            "S3Store",
            {
                "bucket": "bucket",
                "endpoint_url_s3": "https://host",
                "region": "eu-west-1",
                "virtual_hosted_style_request": "true",
            },
        ),
        ("gs://bucket/a", "GCSStore", {"bucket": "bucket"}),
        (
            "gs://bucket/a?endpoint=https://host",
            "GCSStore",
            {"bucket": "bucket", "base_url": "https://host"},
        ),
        (
            "az://cont/a?account=mine&endpoint=https://host/mine",
            "AzureStore",
            {
                "container_name": "cont",
                "account_name": "mine",
                "endpoint": "https://host/mine",
            },
        ),
    ],
)
def test_the_client_is_configured_by_the_url(
    url: str, kind: str, config: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    payload_store = PayloadStore(url, STORE)
    client = payload_store._objects._store  # type: ignore[attr-defined]
    assert type(client).__name__ == kind
    assert client.config == config
    assert client.prefix == f"a/{STORE}"
    assert client.client_options.get("allow_http", "false") == "false"


def test_plain_http_is_allowed_only_if_the_url_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    refused = PayloadStore("s3://bucket/a", STORE)._objects._store  # type: ignore[attr-defined]
    assert "allow_http" not in refused.client_options
    payload_store = PayloadStore("s3://bucket/a?endpoint=http://127.0.0.1:2", STORE)
    client = payload_store._objects._store  # type: ignore[attr-defined]
    assert client.client_options["allow_http"] == "true"
    assert client.config["endpoint_url_s3"] == "http://127.0.0.1:2"
