"""The fields of custom resources that our manifests use, by hand from their published APIs.

kubernetes-validate has schemas of Kubernetes' own kinds only. These are ours and small: they reject
a wrong name or type, not everything that the real admission would. Written against
cert-manager.io/v1, jobset.x-k8s.io/v1alpha2 (JobSet 0.10), trainer.kubeflow.org/v1alpha1 (Trainer
2.2), kueue.x-k8s.io/v1beta2, scheduling.volcano.sh/v1beta1 and monitoring.coreos.com/v1.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
FLAG: Schema = {"type": "boolean"}
STRINGS: Schema = {"type": "array", "items": STRING, "minItems": 1}
HOURS: Schema = {"type": "string", "pattern": r"^\d+h$"}  # Go's durations know no days
SECONDS: Schema = {"type": "string", "pattern": r"^\d+s$"}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
# Checked as a Job's, with Kubernetes' own schema.
JOB_SPEC: Schema = {"type": "object"}

TRAINER = "trainer.kubeflow.org/v1alpha1"
USAGES = ("digital signature", "key encipherment", "server auth", "client auth", "cert sign")


def record(required: tuple[str, ...], **properties: Schema) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def of_kind(api_version: str, kind: str, spec: Schema) -> Schema:
    metadata = record(
        ("name", "namespace"), name=STRING, namespace=STRING, labels=LABELS, annotations=LABELS
    )
    return record(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )


ISSUER = record(
    (),
    selfSigned=record(()),
    ca=record(("secretName",), secretName=STRING),
) | {"minProperties": 1, "maxProperties": 1}

CERTIFICATE = record(
    ("secretName", "issuerRef", "commonName"),
    secretName=STRING,
    commonName=STRING | {"maxLength": 64},
    isCA=FLAG,
    dnsNames=STRINGS,
    ipAddresses=STRINGS,
    usages={"type": "array", "items": {"enum": list(USAGES)}},
    duration=HOURS,
    renewBefore=HOURS,
    privateKey=record(
        ("algorithm", "size"),
        algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
        size=POSITIVE,
        rotationPolicy={"enum": ["Always", "Never"]},
    ),
    issuerRef=record(
        ("name", "kind", "group"),
        name=STRING,
        kind={"enum": ["Issuer", "ClusterIssuer"]},
        group={"const": "cert-manager.io"},
    ),
)

_REPLICATED_JOB = record(
    ("name", "template"),
    name=STRING,
    replicas=POSITIVE,
    template=record(("spec",), metadata=record((), labels=LABELS), spec=JOB_SPEC),
)

JOBSET = record(
    ("replicatedJobs",),
    replicatedJobs={"type": "array", "items": _REPLICATED_JOB, "minItems": 1},
    failurePolicy=record((), maxRestarts=COUNT),
    successPolicy=record(("operator",), operator={"enum": ["All", "Any"]}),
    network=record((), enableDNSHostnames=FLAG, subdomain=STRING, publishNotReadyAddresses=FLAG),
    ttlSecondsAfterFinished=COUNT,
    suspend=FLAG,
)

TRAINING_RUNTIME = record(
    ("template",),
    mlPolicy=record((), numNodes=POSITIVE),
    template=record(("spec",), metadata=record((), labels=LABELS), spec=JOBSET),
)

TRAINJOB = record(
    ("runtimeRef",),
    runtimeRef=record(
        ("name",),
        apiGroup={"const": "trainer.kubeflow.org"},
        kind={"enum": ["TrainingRuntime", "ClusterTrainingRuntime"]},
        name=STRING,
    ),
    trainer=record((), numNodes=POSITIVE, image=STRING, command=STRINGS, args=STRINGS),
    suspend=FLAG,
)

POD_MONITOR = record(
    ("selector", "podMetricsEndpoints"),
    selector=record(("matchLabels",), matchLabels=LABELS | {"minProperties": 1}),
    podMetricsEndpoints={
        "type": "array",
        "items": record(("port",), port=STRING, path={"const": "/metrics"}, interval=SECONDS),
        "minItems": 1,
    },
)

_ALERT = record(
    ("alert", "expr", "labels", "annotations"),
    alert={"type": "string", "pattern": "^[A-Z][A-Za-z]+$"},
    expr=STRING,
    labels=record(("severity",), severity={"enum": ["critical", "warning", "info"]}),
    annotations=record(("summary", "description"), summary=STRING, description=STRING),
    **{"for": {"type": "string", "pattern": r"^\d+(s|m|h)$"}},
)

PROMETHEUS_RULE = record(
    ("groups",),
    groups={
        "type": "array",
        "items": record(
            ("name", "rules"), name=STRING, rules={"type": "array", "items": _ALERT, "minItems": 1}
        ),
        "minItems": 1,
    },
)

SCHEMAS: dict[str, Schema] = {
    "Issuer": of_kind("cert-manager.io/v1", "Issuer", ISSUER),
    "Certificate": of_kind("cert-manager.io/v1", "Certificate", CERTIFICATE),
    "JobSet": of_kind("jobset.x-k8s.io/v1alpha2", "JobSet", JOBSET),
    "TrainingRuntime": of_kind(
        "trainer.kubeflow.org/v1alpha1", "TrainingRuntime", TRAINING_RUNTIME
    ),
    "TrainJob": of_kind("trainer.kubeflow.org/v1alpha1", "TrainJob", TRAINJOB),
    "LocalQueue": of_kind(
        "kueue.x-k8s.io/v1beta2", "LocalQueue", record(("clusterQueue",), clusterQueue=STRING)
    ),
    "PodMonitor": of_kind("monitoring.coreos.com/v1", "PodMonitor", POD_MONITOR),
    "PrometheusRule": of_kind("monitoring.coreos.com/v1", "PrometheusRule", PROMETHEUS_RULE),
    "PodGroup": of_kind(
        "scheduling.volcano.sh/v1beta1",
        "PodGroup",
        record(("minMember",), minMember=POSITIVE, queue=STRING),
    ),
}
