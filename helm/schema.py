"""The chart's values.schema.json: strict, and `settings` taken from the processes' own settings models."""

from collections.abc import Mapping
from typing import Any

from api.jobs.settings import JobSettings
from api.settings import ApiSettings
from shared.settings import ServiceSettings
from worker.settings import WorkerSettings

Schema = dict[str, Any]

# Fields that the chart sets from other values, and fields that mean nothing in a pod.
API_SET_BY_CHART = frozenset(
    {
        "redis_url",
        "redis_username",
        "redis_password",
        "host",
        "port",
        "drain_delay_s",
        "drain_s",
        "ready_without_workers",
        "api_keys_file",
        "webhook_secrets_file",
        "model_store",
    }
)
# The jobs serve nothing, so what only the front's server reads is left out as well.
JOBS_SET_BY_CHART = API_SET_BY_CHART | {"cors_origins", "health_timeout_s", "max_body_bytes", "keepalive_s"}
WORKER_SET_BY_CHART = frozenset(
    {
        "redis_url",
        "redis_username",
        "redis_password",
        "model",
        "model_name",
        "partitions",
        "model_store",
        "device",
        "max_rows",
        "tensor_parallel",
        "load_s",
        "drain_s",
        "metrics_host",
        "metrics_port",
    }
)
NOT_IN_PODS = {
    "data_dir": "the embedded server and its logs, which pods do not have",
    "ready_file": "probes ask over HTTP",
}

_MODEL_NAME = r"^([A-Za-z0-9][A-Za-z0-9._/-]{0,95})?$"
_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
_LABEL_VALUE = r"^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$"
_DNS = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"


def values_schema() -> Schema:
    """Return the schema of values.yaml; draft 7, which Helm 3 and 4 both read."""
    root = _whole(
        nameOverride=_name(63),
        fullnameOverride=_name(63),
        commonLabels=_ref("labels"),
        checkApis=_BOOL,
        **{"global": _whole(imageRegistry=_STR, imagePullSecrets=_list(_NONEMPTY))},
        images=_whole(api=_image(), worker=_image(cpuDigest=_DIGEST), devRedis=_image()),
        redis=_redis(),
        devRedis=_whole(
            enabled=_BOOL,
            resources=_ref("resources"),
            maxMemory={"type": "string", "pattern": "^[0-9]+(kb|mb|gb)$"},
            podAnnotations=_ref("annotations"),
        ),
        podDefaults=_pod_defaults(),
        modelStore=_whole(
            claimName=_STR,
            hostPath={"type": "string", "pattern": "^(/.*)?$"},
            path={"type": "string", "not": {"pattern": r"(^|/)\.\.(/|$)"}},
        ),
        api=_api(),
        jobs=_jobs(),
        poolDefaults={"allOf": [_ref("pool"), {"required": list(_pool())}]},
        pools={
            "type": "object",
            "propertyNames": {"pattern": _DNS, "maxLength": 40},
            "additionalProperties": _ref("pool"),
        },
        networkPolicy=_whole(enabled=_BOOL, apiFrom=_PEERS, metricsFrom=_PEERS, dnsTo=_PEERS, kedaFrom=_PEERS),
        monitoring=_monitoring(),
        extraObjects=_list({"type": "object", "required": ["apiVersion", "kind"]}),
    )
    definitions = {
        "labels": {"type": "object", "additionalProperties": {"type": "string", "pattern": _LABEL_VALUE}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
        "amounts": {
            "type": "object",
            "additionalProperties": {
                "anyOf": [{"type": "string", "pattern": _QUANTITY}, {"type": "number", "minimum": 0}]
            },
        },
        "resources": _whole(requests=_ref("amounts"), limits=_ref("amounts")),
        "pool": _part(**_pool()),
        "apiSettings": settings_schema(ApiSettings, API_SET_BY_CHART),
        "jobsSettings": settings_schema(JobSettings, JOBS_SET_BY_CHART),
        "workerSettings": settings_schema(WorkerSettings, WORKER_SET_BY_CHART),
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the Diffleet chart",
        **root,
        "definitions": definitions,
    }


def settings_schema(model: type[ServiceSettings], set_by_chart: frozenset[str]) -> Schema:
    """Return the schema of `settings`: every field of the process that the chart does not set otherwise."""
    whole = model.model_json_schema()
    if "$defs" in whole:
        raise ValueError(f"{model.__name__} has nested models, which an environment variable cannot show")
    fields = {
        name: _plain(field)
        for name, field in whole["properties"].items()
        if name not in set_by_chart and name not in NOT_IN_PODS
    }
    return _part(**fields)


def _plain(field: Mapping[str, Any]) -> Schema:
    """Drop what is not a rule; an unset field is one that is left out, so null is not a value."""
    rules = {key: value for key, value in field.items() if key not in {"title", "default", "format"}}
    if "anyOf" in rules:
        choices = [_plain(choice) for choice in rules.pop("anyOf") if choice.get("type") != "null"]
        if len(choices) != 1:
            raise ValueError(f"{field} has several types")
        rules |= choices[0]
    return rules


def _redis() -> Schema:
    role_keys = _whole(api=_STR, worker=_STR, jobs=_STR, keda=_STR)
    return _whole(
        host={"type": "string", "pattern": r"^([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?)?$"},
        kind={"enum": ["server", "sentinel", "cluster"]},
        port=_PORT,
        addresses=_list({"type": "string", "pattern": r"^[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?:[0-9]{1,5}$"}),
        service={"type": "string", "pattern": r"^[A-Za-z0-9._-]+$"},
        db=_integer(0, 1023),
        tls=_whole(enabled=_BOOL, caSecret=_STR, caKey=_NONEMPTY),
        auth=_whole(existingSecret=_STR, usernameKeys=role_keys, passwordKeys=role_keys),
        acl=_whole(enabled=_BOOL, userPrefix={"type": "string", "pattern": "^[A-Za-z0-9_.-]*$"}),
        networkPolicy=_whole(cidrs=_list(_NONEMPTY), podSelector=_OPEN, namespaceSelector=_OPEN),
    )


def _pod_defaults() -> Schema:
    variable = _whole(
        name={"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "not": {"pattern": "^DIFFLEET_"}}, value=_STR
    )
    return _whole(
        annotations=_ref("annotations"),
        labels=_ref("labels"),
        **_placement(spread=False),
        schedulerName=_STR,
        extraEnv=_list(variable),
        security=_whole(
            assignIds=_BOOL,
            runAsUser=_integer(1, 2**31 - 1),
            runAsGroup=_integer(1, 2**31 - 1),
            fsGroup=_integer(1, 2**31 - 1),
        ),
        serviceAccount=_whole(create=_BOOL, annotations=_ref("annotations"), existingName=_STR),
    )


def _api() -> Schema:
    return _whole(
        replicas=_integer(0, 1000),
        port=_integer(1024, 65535),
        settings=_ref("apiSettings"),
        keys=_whole(existingSecret=_STR, key=_NONEMPTY),
        webhooks=_whole(existingSecret=_STR, key=_NONEMPTY),
        resources=_ref("resources"),
        drain=_whole(delaySeconds=_integer(0, 600), seconds=_integer(0, 3600)),
        terminationGracePeriodSeconds=_integer(15, 7200),
        startupBudgetSeconds=_integer(2, 3600),
        rollout=_rollout(),
        autoscaling=_whole(
            enabled=_BOOL,
            minReplicas=_integer(1, 1000),
            maxReplicas=_integer(1, 1000),
            targetCPU=_integer(1, 1000),
            scaleDownWindowSeconds=_integer(0, 3600),
        ),
        pdb=_pdb(),
        service=_whole(
            type={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}, port=_PORT, annotations=_ref("annotations")
        ),
        ingress=_whole(
            enabled=_BOOL,
            className=_STR,
            annotations=_ref("annotations"),
            hosts=_list(_NONEMPTY),
            path=_PATH,
            tlsSecret=_STR,
        ),
        gateway=_whole(
            enabled=_BOOL,
            annotations=_ref("annotations"),
            parentRefs=_list({"type": "object", "required": ["name"]}),
            hostnames=_list(_NONEMPTY),
            path=_PATH,
        ),
        podAnnotations=_ref("annotations"),
        **_placement(spread=True),
        egress=_list(_OPEN),
    )


def _jobs() -> Schema:
    return _whole(
        enabled=_BOOL,
        settings=_ref("jobsSettings"),
        replicas=_integer(0, 100),
        resources=_ref("resources"),
        drain=_whole(seconds=_integer(0, 86_400)),
        terminationGracePeriodSeconds=_integer(15, 90_000),
        podAnnotations=_ref("annotations"),
        **_placement(spread=True),
        egress=_list(_OPEN),
    )


def _pool() -> dict[str, Schema]:
    """Return the keys of a pool; none is required, since `poolDefaults` has them all."""
    return {
        "enabled": _BOOL,
        "model": _part(
            name={"type": "string", "pattern": _MODEL_NAME},
            source={"enum": ["bundled", "pvc", "image", "hostPath", "init"]},
            path={"type": "string", "not": {"pattern": r"(^|/)\.\.(/|$)"}},
            pvc=_part(
                claimName=_STR,
                accessMode={"enum": ["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"]},
            ),
            image=_part(reference=_IMAGE, pullPolicy=_PULL),
            hostPath={"type": "string", "pattern": "^(/.*)?$"},
            init=_part(
                image=_IMAGE,
                command=_list(_STR),
                env=_list({"type": "object", "required": ["name"]}),
                sizeLimit=_QUANTITY_STR,
                resources=_part(requests=_ref("amounts"), limits=_ref("amounts")),
            ),
        ),
        "partitions": _integer(1, 1000),
        "maxRows": _integer(1, 4096),
        "settings": _ref("workerSettings"),
        "image": _IMAGE,
        "gpu": _part(
            count=_integer(0, 1),
            resource={"type": "string", "pattern": r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$"},
            toleration=_BOOL,
            runtimeClassName=_STR,
        ),
        "resources": _part(requests=_ref("amounts"), limits=_ref("amounts")),
        "shmSize": _QUANTITY_STR,
        "tmpSize": _QUANTITY_STR,
        "compileCache": _part(type={"enum": ["emptyDir", "pvc"]}, claimName=_STR, sizeLimit=_QUANTITY_STR),
        "startup": _part(periodSeconds=_integer(1, 300), budgetSeconds=_integer(10, 86_400)),
        "drain": _part(seconds=_integer(0, 86_400)),
        "terminationGracePeriodSeconds": _integer(15, 90_000),
        "metricsPort": _integer(1024, 65535),
        "rollout": _part(maxSurge=_integer(0, 100), maxUnavailable=_integer(0, 100)),
        "pdb": _part(enabled=_BOOL, maxUnavailable=_BOUND, minAvailable=_BOUND),
        "replicas": _integer(0, 1000),
        "scaling": _part(
            enabled=_BOOL,
            min=_integer(0, 1000),
            max=_integer(1, 1000),
            lanes={**_list({"enum": ["rt", "std", "bulk"]}), "minItems": 1, "uniqueItems": True},
            target=_integer(0, 1_000_000),
            activation=_integer(0, 1_000_000),
            pollingInterval=_integer(1, 3600),
            cooldownPeriod=_integer(0, 86_400),
            initialCooldownPeriod=_integer(0, 86_400),
            fallback=_part(failureThreshold=_integer(1, 1000), replicas=_integer(1, 1000)),
            scaleUp=_speed(),
            scaleDown=_speed(),
            prometheus=_part(enabled=_BOOL, serverAddress=_STR, query=_STR, target=_integer(1, 1_000_000)),
            paused=_BOOL,
            pausedScaleIn=_BOOL,
        ),
        "podAnnotations": _ref("annotations"),
        "podLabels": _ref("labels"),
        **_placement(spread=True),
        "egress": _list(_OPEN),
    }


def _monitoring() -> Schema:
    monitor = _whole(enabled=_BOOL, labels=_ref("labels"), interval={"type": "string", "pattern": "^[0-9]+(ms|s|m)$"})
    return _whole(
        serviceMonitor=monitor,
        podMonitor=monitor,
        rules=_whole(enabled=_BOOL, labels=_ref("labels"), configMap=_BOOL),
        dashboards=_whole(
            enabled=_BOOL, label=_NONEMPTY, labelValue={"type": "string", "pattern": _LABEL_VALUE}, folder=_STR
        ),
    )


def _placement(spread: bool) -> dict[str, Schema]:
    keys: dict[str, Schema] = {
        "nodeSelector": _ref("labels"),
        "tolerations": _list(_OPEN),
        "affinity": _OPEN,
        "priorityClassName": _STR,
    }
    if spread:
        keys["topologySpread"] = _list(
            _whole(
                topologyKey=_NONEMPTY,
                maxSkew=_integer(1, 1000),
                whenUnsatisfiable={"enum": ["ScheduleAnyway", "DoNotSchedule"]},
            )
        )
    return keys


def _image(**more: Schema) -> Schema:
    return _whole(
        repository={"type": "string", "pattern": r"^[a-z0-9][a-z0-9._/:-]*$"},
        tag={"type": "string", "pattern": r"^[A-Za-z0-9._-]*$", "not": {"enum": ["latest"]}},
        digest=_DIGEST,
        pullPolicy=_PULL,
        **more,
    )


def _rollout() -> Schema:
    return _whole(maxSurge=_integer(0, 100), maxUnavailable=_integer(0, 100))


def _pdb() -> Schema:
    # A value of null is a key that is left out.
    whole = _part(enabled=_BOOL, maxUnavailable=_BOUND, minAvailable=_BOUND)
    return {**whole, "required": ["enabled"]}


def _speed() -> Schema:
    return _part(windowSeconds=_integer(0, 3600), pods=_integer(1, 1000), periodSeconds=_integer(1, 1800))


def _whole(**properties: Schema) -> Schema:
    """Return an object that has these keys, all of them."""
    return {**_part(**properties), "required": list(properties)}


def _part(**properties: Schema) -> Schema:
    """Return an object that has no other keys than these."""
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _integer(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def _name(longest: int) -> Schema:
    return {"type": "string", "maxLength": longest, "pattern": r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$"}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


_BOOL: Schema = {"type": "boolean"}
_STR: Schema = {"type": "string"}
_NONEMPTY: Schema = {"type": "string", "minLength": 1}
_OPEN: Schema = {"type": "object"}
"""A piece of a pod or policy that is passed on as it is: the API server checks it."""
_PEERS = _list({"type": "object", "minProperties": 1})
_PORT = _integer(1, 65535)
_PATH: Schema = {"type": "string", "pattern": "^/"}
_PULL: Schema = {"enum": ["IfNotPresent", "Always", "Never"]}
_DIGEST: Schema = {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"}
_IMAGE: Schema = {"type": "string", "not": {"pattern": ":latest$"}}
_QUANTITY_STR: Schema = {"type": "string", "pattern": _QUANTITY}
_BOUND: Schema = {
    "anyOf": [
        _integer(0, 1000),
        {"type": "string", "pattern": "^([0-9]|[1-9][0-9]|100)%$"},
        {"type": "null"},
    ]
}
