{{/*
The parts of a pod specification that are the same for every workload, hooks and tests too.
Takes (dict "root" "component" ["pool"] "place" ["grace"]), `place` having nodeSelector, tolerations, affinity,
priorityClassName, topologySpread and optionally gpuToleration, runtimeClassName.
*/}}
{{- define "diffleet.podSpec" -}}
{{- $values := .root.Values -}}
{{- $defaults := $values.podDefaults -}}
serviceAccountName: {{ include "diffleet.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  {{- if $defaults.security.assignIds }}
  runAsUser: {{ int $defaults.security.runAsUser }}
  runAsGroup: {{ int $defaults.security.runAsGroup }}
  fsGroup: {{ int $defaults.security.fsGroup }}
  fsGroupChangePolicy: OnRootMismatch
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- with $values.global.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- if hasKey . "grace" }}
terminationGracePeriodSeconds: {{ int .grace }}
{{- end }}
{{- with merge (dict) .place.nodeSelector $defaults.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $tolerations := concat .place.tolerations $defaults.tolerations }}
{{- with .place.gpuToleration }}
{{- $tolerations = append $tolerations (dict "key" . "operator" "Exists" "effect" "NoSchedule") }}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with default $defaults.affinity .place.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with default $defaults.priorityClassName .place.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $defaults.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with .place.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .place.topologySpread }}
topologySpreadConstraints:
  {{- range . }}
  - topologyKey: {{ .topologyKey | quote }}
    maxSkew: {{ int .maxSkew }}
    whenUnsatisfiable: {{ .whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "diffleet.selectorLabels" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "diffleet.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  privileged: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities:
    drop:
      - ALL
{{- end -}}

{{- define "diffleet.serviceAccount" -}}
{{- with .root.Values.podDefaults.serviceAccount -}}
{{- if .create -}}
{{- include "diffleet.object" (dict "root" $.root "suffix" $.component) -}}
{{- else -}}
{{- default "default" .existingName -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Labels of pods; none that changes with the chart's version, which would restart every GPU pod for nothing.
Takes (dict "root" "component" ["pool"] ["labels"]).
*/}}
{{- define "diffleet.podLabels" -}}
{{ include "diffleet.selectorLabels" . }}
app.kubernetes.io/part-of: diffleet
{{- range $key, $value := merge (dict) (default dict .labels) .root.Values.podDefaults.labels .root.Values.commonLabels }}
{{ $key }}: {{ $value | toString | quote }}
{{- end }}
{{- end -}}

{{/* Annotations of pods, without the key itself. Takes (dict "root" "annotations" ["config"]). */}}
{{- define "diffleet.podAnnotations" -}}
{{- range $key, $value := merge (dict) (default dict .annotations) .root.Values.podDefaults.annotations }}
{{ $key }}: {{ $value | toString | quote }}
{{- end }}
{{- with .config }}
checksum/config: {{ . | sha256sum }}
{{- end }}
{{- end -}}

{{/* Environment that every container of ours has: only these places are writable. Takes the root. */}}
{{- define "diffleet.commonEnv" -}}
- name: HOME
  value: /tmp
- name: TMPDIR
  value: /tmp
- name: PYTHONDONTWRITEBYTECODE
  value: "1"
- name: PYTHONUNBUFFERED
  value: "1"
{{- range .Values.podDefaults.extraEnv }}
- name: {{ .name }}
  value: {{ .value | quote }}
{{- end }}
{{- end -}}

{{/* Requests and limits as strings, a device added to both. Takes (dict "resources" ["device" "count"]). */}}
{{- define "diffleet.resources" -}}
{{- $device := default "" .device }}
{{- $count := default 0 .count }}
{{- range $kind := list "requests" "limits" }}
{{- $amounts := dict }}
{{- range $name, $amount := get $.resources $kind }}
{{- $_ := set $amounts $name (toString $amount) }}
{{- end }}
{{- if $device }}
{{- $_ := set $amounts $device (toString $count) }}
{{- end }}
{{- if $amounts }}
{{ $kind }}:
  {{- range $name, $amount := $amounts }}
  {{ $name }}: {{ $amount | quote }}
  {{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A PodDisruptionBudget's bound. Takes a pdb. */}}
{{- define "diffleet.disruption" -}}
{{- if not (kindIs "invalid" .maxUnavailable) }}
maxUnavailable: {{ include "diffleet.intOrPercent" .maxUnavailable }}
{{- else }}
minAvailable: {{ include "diffleet.intOrPercent" .minAvailable }}
{{- end }}
unhealthyPodEvictionPolicy: AlwaysAllow
{{- end -}}

{{- define "diffleet.intOrPercent" -}}
{{- if kindIs "string" . -}}{{- . | quote -}}{{- else -}}{{- int . -}}{{- end -}}
{{- end -}}
