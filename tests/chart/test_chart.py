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
    "memory and disk": {"kvstore": {"hostGib": 8, "nvme": {"gib": 100.5}}},
    "claims and Valkey": {
        "kvstore": {"nvme": {"gib": 40, "ephemeral": False}, "redis": {"kind": "embedded"}}
    },
    "external Redis": {
        "kvstore": {
            "nvme": {"gib": 40, "path": "/mnt/kv"},
            "redis": {"kind": "external", "existingSecret": "my-redis"},
        }
    },
    "metrics": {"observability": {"metrics": {"enabled": True, "port": 9999}}},
    "http": {"router": {"http": {"enabled": True, "port": 8123}}},
    "two groups": {"workers": [DEFAULTS["workers"][0], CPU["workers"][0]]},
    "codes on the device": {
        "model": {"kvCodec": "oscar:sinks=64,window=256", "calibration": "/models/m.calibration"}
    },
    "codes below it": {
        "kvstore": {"hostGib": 4, "coldCodec": "turboquant4"},
        "model": {"retention": "triattention", "calibration": "/models/m.calibration"},
    },
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


def worker_pod(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The one worker group's StatefulSet and its arguments by option."""
    [owner] = [
        o for o in by_kind(render(values), "StatefulSet") if "ray" not in o["metadata"]["name"]
    ]
    args = owner["spec"]["template"]["spec"]["containers"][0]["args"]
    pairs = (arg.removeprefix("--").partition("=") for arg in args)
    return owner, {option: value for option, _, value in pairs}


def mounts(owner: dict[str, Any]) -> dict[str, str]:
    container = owner["spec"]["template"]["spec"]["containers"][0]
    return {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}


def volumes(owner: dict[str, Any]) -> dict[str, Any]:
    return {volume["name"]: volume for volume in owner["spec"]["template"]["spec"]["volumes"]}


def test_no_tier_unless_asked_for() -> None:
    owner, args = worker_pod({})
    assert not {"host-gib", "nvme", "nvme-gib", "redis", "namespace"} & set(args)
    assert not {"kv", "redis"} & set(mounts(owner))


def test_tiers_arrive_at_the_replica_with_room_to_lie_in() -> None:
    owner, args = worker_pod(VARIANTS["memory and disk"])
    assert (args["host-gib"], args["nvme-gib"]) == ("8", "100.5")
    assert mounts(owner)["kv"] == args["nvme"]
    assert volumes(owner)["kv"]["emptyDir"] == {"sizeLimit": "103Gi"}
    owner, args = worker_pod(VARIANTS["claims and Valkey"])
    claims = {c["metadata"]["name"]: c["spec"] for c in owner["spec"]["volumeClaimTemplates"]}
    assert claims["kv"]["resources"]["requests"]["storage"] == "42Gi"
    assert "kv" not in volumes(owner) and mounts(owner)["kv"] == args["nvme"]
    owner, args = worker_pod(VARIANTS["external Redis"])
    assert args["nvme"] == "/mnt/kv" and "kv" not in mounts(owner)
    assert volumes(owner)["redis"]["secret"]["secretName"] == "my-redis"
    assert args["redis"] == f"@{mounts(owner)['redis']}/url" and args["namespace"] == "llm.banyan"


@pytest.mark.parametrize(
    ("values", "kv", "cold", "retention"),
    [
        ("defaults", "model", "none", ""),
        ("codes on the device", "oscar:sinks=64,window=256", "none", ""),
        ("codes below it", "model", "turboquant4", "triattention"),
    ],
)
def test_codecs_and_retention_arrive_at_the_replica(
    values: str, kv: str, cold: str, retention: str
) -> None:
    _, args = worker_pod(VARIANTS[values])
    assert (args["kv-codec"], args["cold-codec"]) == (kv, cold)
    assert args.get("retention", "") == retention
    calibrated = args.get("calibration", "")
    assert calibrated == VARIANTS[values].get("model", {}).get("calibration", "")


def test_replicas_can_parse_what_the_chart_says(tmp_path: Path) -> None:
    from banyan.cluster import pod
    from worker.service.settings import parse_config

    for values in VARIANTS.values():
        for owner in by_kind(render(values), "StatefulSet"):
            if "ray" in owner["metadata"]["name"]:
                continue
            args = owner["spec"]["template"]["spec"]["containers"][0]["args"]
            given = [a.replace("$(POD_IP)", "10.0.0.1").replace("$(POD_NAME)", "p-0") for a in args]
            options = pod.parse(given)
            parse_config(pod.replica_config(options, "fake:full").as_dict())
            assert (
                options.grace_s + pod.LEAVE_S_MAX
                <= (owner["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])
            )


def test_the_password_of_the_chart_s_valkey_is_in_its_secret_alone() -> None:
    objects = render(VARIANTS["claims and Valkey"])
    [secret] = [s for s in by_kind(objects, "Secret") if s["metadata"]["name"] == "banyan-cache"]
    url = base64.b64decode(secret["data"]["url"]).decode()
    password = url.removeprefix("redis://:").partition("@")[0]
    assert len(password) == 48 and url.endswith("@banyan-cache:6379/0")
    assert password in base64.b64decode(secret["data"]["valkey.conf"]).decode()
    assert not [o for o in objects if o is not secret and password in json.dumps(o)]
    [server] = [d for d in by_kind(objects, "Deployment") if "cache" in d["metadata"]["name"]]
    args = server["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[args.index("--bind") + 1] == "$(POD_IP)"
    assert args[args.index("--maxmemory") + 1] == "2048mb"
    services = {s["metadata"]["name"] for s in by_kind(objects, "Service")}
    assert "banyan-cache" in services


def test_no_metrics_unless_asked_for() -> None:
    assert "metrics" not in json.dumps(render({})) and "prometheus" not in json.dumps(render({}))


def test_metrics_are_found_at_every_router_and_never_behind_the_clients_service() -> None:
    objects = render(VARIANTS["metrics"])
    [router] = [d for d in by_kind(objects, "Deployment") if "router" in d["metadata"]["name"]]
    pod = router["spec"]["template"]
    [container] = pod["spec"]["containers"]
    assert "--metrics=$(POD_IP):9999" in container["args"]
    assert {"name": "metrics", "containerPort": 9999} in container["ports"]
    found = pod["metadata"]["annotations"]
    assert found["prometheus.io/scrape"] == "true" and found["prometheus.io/path"] == "/metrics"
    assert found["prometheus.io/port"] == "9999"
    ports = {
        s["metadata"]["name"]: {p["name"]: p["port"] for p in s["spec"]["ports"]}
        for s in by_kind(objects, "Service")
    }
    assert [name for name, of in ports.items() if "metrics" in of] == ["banyan-routers"]
    assert ports["banyan-routers"]["metrics"] == 9999


def test_http_is_off_by_default_and_else_behind_the_clients_service() -> None:
    off = render({})
    assert "--http" not in json.dumps(off)
    objects = render(VARIANTS["http"])
    [router] = [d for d in by_kind(objects, "Deployment") if "router" in d["metadata"]["name"]]
    [container] = router["spec"]["template"]["spec"]["containers"]
    assert "--http=$(POD_IP):8123" in container["args"]
    assert {"name": "http", "containerPort": 8123} in container["ports"]
    ports = [(s, p) for s in by_kind(objects, "Service") for p in s["spec"]["ports"]]
    [(service, port)] = [(s, p) for s, p in ports if p["name"] == "http"]
    assert service["metadata"]["name"] == "banyan"
    assert (port["port"], port["targetPort"]) == (8123, "http")


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
        ("model.kvCodec", "zip"),
        ("model.kvCodec", "turboquant:k5v4"),
        ("kvstore.coldCodec", "oscar"),
        ("router.replicas", 0),
        ("router.replicas", "two"),
        ("router.ports.grpc", 70000),
        ("router.colour", "blue"),
        ("router.http.port", 0),
        ("router.http.enabled", "yes"),
        ("router.http.host", "0.0.0.0"),
        ("workers", []),
        ("workers.0.name", "Not A Name"),
        ("workers.0.poolGib", 0),
        ("image.digest", "latest"),
        ("model.dtype", "int3"),
        ("kvstore.hostGib", -1),
        ("kvstore.nvme.gib", "much"),
        ("kvstore.nvme.path", "relative"),
        ("kvstore.redis.kind", "memcached"),
        ("kvstore.redis.kind", "external"),  # without its Secret
        ("kvstore.redis.password", "in the values"),
        ("observability.metrics.port", 0),
        ("observability.metrics.enabled", "yes"),
        ("observability.metrics.host", "0.0.0.0"),
        ("observability.traces", {}),
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
