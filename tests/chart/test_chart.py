"""The chart: linted and rendered by Helm's own engine, every object validated strictly."""

import base64
import copy
import json
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "helm" / "banyan"
KUBERNETES = "1.33"
INFO = 1  # of Helm's severities; 2 warns, 3 fails
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
CPU = yaml.safe_load((CHART / "values-cpu.yaml").read_text())
VARIANTS = {
    "defaults": {},
    "cpu": CPU,
    "existing secret": {"secret": {"existingSecret": "mine"}},
    "digest": {"image": {"digest": "sha256:" + "0" * 64}},
    "two groups": {"workers": [DEFAULTS["workers"][0], CPU["workers"][0]]},
}


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    with helm_python.Chart.load(CHART) as chart:
        rendered = chart.render(values, name="banyan", namespace="llm")
    texts = [text for name, text in rendered.items() if name.endswith(".yaml")]
    return [d for text in texts for d in yaml.safe_load_all(text) if d is not None]


def by_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [o for o in objects if o["kind"] == kind]


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_lint_finds_nothing(values: dict[str, Any]) -> None:
    report = helm_python.lint(CHART, values, strict=True)
    assert not report["errors"]
    assert not [m for m in report["messages"] if m["severity"] > INFO]


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_every_object_is_valid_kubernetes(values: dict[str, Any]) -> None:
    objects = render(values)
    kinds = {o["kind"] for o in objects}
    assert {"Deployment", "StatefulSet", "Service", "ServiceAccount", "Pod"} <= kinds
    for one in objects:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)


def pod_specs(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    owners = by_kind(objects, "Deployment") + by_kind(objects, "StatefulSet")
    return [o["spec"]["template"]["spec"] for o in owners] + [
        o["spec"] for o in by_kind(objects, "Pod")
    ]


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_pods_are_restricted(values: dict[str, Any]) -> None:
    for pod in pod_specs(render(values)):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]
            assert security["readOnlyRootFilesystem"] is True


def test_probe_ports_are_integers_that_the_container_opens() -> None:
    for pod in pod_specs(render(CPU)):
        for container in pod["containers"]:
            opened = {p["containerPort"] for p in container.get("ports", [])}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if "grpc" in container.get(probe, {}):
                    assert container[probe]["grpc"]["port"] in opened


def test_nothing_listens_on_all_interfaces() -> None:
    for pod in pod_specs(render({})):
        for container in pod["containers"]:
            assert "0.0.0.0" not in " ".join(container.get("args", []))


def test_replicas_dial_a_headless_name_of_all_routers() -> None:
    objects = render(CPU)
    headless = {
        s["metadata"]["name"]
        for s in by_kind(objects, "Service")
        if s["spec"].get("clusterIP") == "None"
    }
    workers = [
        s for s in by_kind(objects, "StatefulSet") if "ray-head" not in s["metadata"]["name"]
    ]
    assert len(workers) == 1
    args = workers[0]["spec"]["template"]["spec"]["containers"][0]["args"]
    routers = next(a for a in args if a.startswith("--routers=")).removeprefix("--routers=")
    assert routers.split(":")[0] in headless


def test_the_cpu_values_ask_for_no_gpu_and_the_defaults_do() -> None:
    assert "nvidia.com/gpu" in json.dumps(render({}))
    assert "nvidia.com/gpu" not in json.dumps(render(CPU))


def test_a_made_secret_is_hex_and_an_existing_one_is_not_replaced() -> None:
    secret = by_kind(render({}), "Secret")[0]
    cluster = base64.b64decode(secret["data"]["cluster"]).decode()
    assert len(bytes.fromhex(cluster)) >= 32
    assert not by_kind(render({"secret": {"existingSecret": "mine"}}), "Secret")


def altered(path: str, value: object) -> dict[str, Any]:
    values = copy.deepcopy(DEFAULTS)
    target, *rest = path.split(".")
    node: Any = values
    for key in (target, *rest)[:-1]:
        node = node[int(key)] if key.isdigit() else node[key]
    node[(target, *rest)[-1]] = value
    return values


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("router.replicas", 0),
        ("router.replicas", "two"),
        ("router.ports.grpc", 70000),
        ("router.colour", "blue"),
        ("workers", []),
        ("workers.0.name", "Not A Name"),
        ("workers.0.poolGib", 0),
        ("image.digest", "latest"),
        ("model.dtype", "int3"),
        ("unknown", 1),
    ],
)
def test_the_schema_refuses(path: str, value: object) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.validate(DEFAULTS, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(altered(path, value), schema)
    with pytest.raises(helm_python.HelmError):
        render(altered(path, value))
