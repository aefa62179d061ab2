{{/* Configuration of one pool. Takes (dict "root" "pool"). */}}
{{- define "diffleet.workerConfig" -}}
{{- $pool := .pool -}}
{{- $model := $pool.model -}}
DIFFLEET_REDIS_URL: {{ include "diffleet.redisUrl" .root | quote }}
DIFFLEET_MODEL: {{ include "diffleet.modelPath" $model | quote }}
DIFFLEET_MODEL_NAME: {{ $model.name | quote }}
DIFFLEET_PARTITIONS: {{ int $pool.partitions | quote }}
DIFFLEET_DEVICE: {{ gt (int $pool.gpu.count) 0 | ternary "cuda" "cpu" | quote }}
DIFFLEET_TENSOR_PARALLEL: {{ max 1 (int $pool.gpu.count) | quote }}
DIFFLEET_MAX_ROWS: {{ int $pool.maxRows | quote }}
DIFFLEET_LOAD_S: {{ int $pool.startup.budgetSeconds | quote }}
DIFFLEET_DRAIN_S: {{ int $pool.drain.seconds | quote }}
DIFFLEET_METRICS_HOST: "0.0.0.0"
DIFFLEET_METRICS_PORT: {{ int $pool.metricsPort | quote }}
{{- include "diffleet.storeConfig" .root }}
{{- include "diffleet.settings" $pool.settings }}
{{- end -}}

{{/* Where the worker finds its checkpoint. Takes a pool's model. */}}
{{- define "diffleet.modelPath" -}}
{{- if eq .source "bundled" -}}
{{- default "demo" .path -}}
{{- else if .path -}}
{{- printf "/model/%s" (trimAll "/" .path) -}}
{{- else -}}
/model
{{- end -}}
{{- end -}}

{{- define "diffleet.modelVolume" -}}
{{- if ne .source "bundled" }}
- name: model
  {{- if eq .source "pvc" }}
  persistentVolumeClaim:
    claimName: {{ .pvc.claimName | quote }}
    readOnly: true
  {{- else if eq .source "image" }}
  image:
    reference: {{ .image.reference | quote }}
    pullPolicy: {{ .image.pullPolicy }}
  {{- else if eq .source "hostPath" }}
  hostPath:
    path: {{ .hostPath | quote }}
    type: Directory
  {{- else }}
  emptyDir:
    sizeLimit: {{ .init.sizeLimit | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The worker's image. Takes (dict "root" "pool"). */}}
{{- define "diffleet.workerImage" -}}
{{- $images := .root.Values.images.worker -}}
{{- if .pool.image -}}
{{- include "diffleet.registered" (dict "root" .root "reference" .pool.image) -}}
{{- else if gt (int .pool.gpu.count) 0 -}}
{{- include "diffleet.image" (dict "root" .root "image" $images) -}}
{{- else -}}
{{- include "diffleet.image" (dict "root" .root "image" $images "suffix" "-cpu" "digest" $images.cpuDigest) -}}
{{- end -}}
{{- end -}}
