{{/* Cut to `max` characters; a hash of the whole keeps two long names apart. Takes (dict "text" "max"). */}}
{{- define "diffleet.cut" -}}
{{- if gt (len .text) (int .max) -}}
{{- printf "%s-%s" (.text | trunc (int (sub .max 9)) | trimSuffix "-") (.text | sha256sum | trunc 8) -}}
{{- else -}}
{{- .text -}}
{{- end -}}
{{- end -}}

{{- define "diffleet.name" -}}
{{- include "diffleet.cut" (dict "text" (default .Chart.Name .Values.nameOverride) "max" 63) -}}
{{- end -}}

{{- define "diffleet.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}{{- .Release.Name -}}{{- else -}}{{- printf "%s-%s" .Release.Name $name -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Name of an object. 52 characters, because KEDA names its HPA `keda-hpa-<name>` and puts that in a label of 63.
Takes (dict "root" "suffix").
*/}}
{{- define "diffleet.object" -}}
{{- $text := include "diffleet.fullname" .root -}}
{{- if .suffix -}}{{- $text = printf "%s-%s" $text .suffix -}}{{- end -}}
{{- include "diffleet.cut" (dict "text" $text "max" 52) -}}
{{- end -}}

{{/* Labels that never change between versions. Takes (dict "root" "component" ["pool"]). */}}
{{- define "diffleet.selectorLabels" -}}
app.kubernetes.io/name: {{ include "diffleet.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- if .pool }}
diffleet/pool: {{ .pool | quote }}
{{- end }}
{{- end -}}

{{/* Labels of objects. The same arguments. */}}
{{- define "diffleet.labels" -}}
{{ include "diffleet.selectorLabels" . }}
app.kubernetes.io/part-of: diffleet
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- range $key, $value := .root.Values.commonLabels }}
{{ $key }}: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* Metadata without a closing line. Takes (dict "root" "component" "suffix" ["pool"] ["extraLabels"] ["annotations"]). */}}
{{- define "diffleet.metadata" -}}
name: {{ include "diffleet.object" . }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "diffleet.labels" . | nindent 2 }}
  {{- range $key, $value := .extraLabels }}
  {{ $key }}: {{ $value | toString | quote }}
  {{- end }}
{{- with .annotations }}
annotations:
  {{- range $key, $value := . }}
  {{ $key }}: {{ $value | toString | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Image reference. Takes (dict "root" "image" ["suffix" ["digest"]]). */}}
{{- define "diffleet.image" -}}
{{- $name := include "diffleet.registered" (dict "root" .root "reference" .image.repository) -}}
{{- $digest := hasKey . "digest" | ternary .digest .image.digest -}}
{{- if $digest -}}
{{- printf "%s@%s" $name $digest -}}
{{- else -}}
{{- printf "%s:%s%s" $name (default .root.Chart.AppVersion .image.tag) (default "" .suffix) -}}
{{- end -}}
{{- end -}}

{{/* A reference with the global registry before it, unless it names one. Takes (dict "root" "reference"). */}}
{{- define "diffleet.registered" -}}
{{- $first := splitList "/" .reference | first -}}
{{- $named := and (contains "/" .reference) (or (contains "." $first) (contains ":" $first) (eq $first "localhost")) -}}
{{- if and .root.Values.global.imageRegistry (not $named) -}}
{{- printf "%s/%s" (trimSuffix "/" .root.Values.global.imageRegistry) .reference -}}
{{- else -}}
{{- .reference -}}
{{- end -}}
{{- end -}}

{{/* JSON map of the enabled pools, each complete. */}}
{{- define "diffleet.pools" -}}
{{- $pools := dict -}}
{{- range $key, $pool := .Values.pools -}}
{{- $whole := mergeOverwrite (deepCopy $.Values.poolDefaults) (deepCopy (default dict $pool)) -}}
{{- if $whole.enabled -}}
{{- $_ := set $pools $key $whole -}}
{{- end -}}
{{- end -}}
{{- $pools | toJson -}}
{{- end -}}

{{/* A settings field's environment variable and text: whole numbers without an exponent, lists as JSON. Takes a value. */}}
{{- define "diffleet.settingText" -}}
{{- if kindIs "float64" . -}}
{{- if eq (float64 (int64 .)) . -}}{{- int64 . -}}{{- else -}}{{- . | toJson -}}{{- end -}}
{{- else if or (kindIs "slice" .) (kindIs "map" .) -}}
{{- . | toJson -}}
{{- else -}}
{{- . | toString -}}
{{- end -}}
{{- end -}}

{{- define "diffleet.settings" -}}
{{- range $field, $value := . }}
DIFFLEET_{{ $field | upper }}: {{ include "diffleet.settingText" $value | quote }}
{{- end }}
{{- end -}}

{{/* Requests that one worker should hold: the scaling target. Takes a pool. */}}
{{- define "diffleet.scalingTarget" -}}
{{- if gt (int .scaling.target) 0 -}}{{- int .scaling.target -}}{{- else -}}{{- max 1 (div (mul (int .maxRows) 4) 5) -}}{{- end -}}
{{- end -}}

{{/* Most workers that a pool can have. Takes a pool. */}}
{{- define "diffleet.ceiling" -}}
{{- .scaling.enabled | ternary .scaling.max .replicas | int -}}
{{- end -}}
