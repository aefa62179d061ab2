{{/* Everything about Redis comes from here, for the pods and for KEDA's triggers. */}}

{{- define "diffleet.redisHost" -}}
{{- if .Values.devRedis.enabled -}}
{{- include "diffleet.object" (dict "root" . "suffix" "redis") -}}
{{- else -}}
{{- .Values.redis.host -}}
{{- end -}}
{{- end -}}

{{- define "diffleet.redisUrl" -}}
{{- $redis := .Values.redis -}}
{{- $scheme := $redis.tls.enabled | ternary "rediss" "redis" -}}
{{- if eq $redis.kind "sentinel" -}}
{{- printf "redis+sentinel://%s/%s/%d" (join "," $redis.addresses) $redis.service (int $redis.db) -}}
{{- else if eq $redis.kind "cluster" -}}
{{- printf "%s+cluster://%s/0" $scheme (join "," $redis.addresses) -}}
{{- else -}}
{{- printf "%s://%s:%d/%d" $scheme (include "diffleet.redisHost" .) (int $redis.port) (int $redis.db) -}}
{{- end -}}
{{- if and $redis.tls.enabled $redis.tls.caSecret -}}?ssl_ca_certs=/etc/diffleet/redis/ca.crt{{- end -}}
{{- end -}}

{{/* Hosts and ports that pods call, each as a JSON list. */}}
{{- define "diffleet.redisHosts" -}}
{{- $hosts := list -}}
{{- range .Values.redis.addresses -}}{{- $hosts = append $hosts (regexReplaceAll ":[0-9]+$" . "") -}}{{- end -}}
{{- default (list (include "diffleet.redisHost" .)) $hosts | toJson -}}
{{- end -}}

{{- define "diffleet.redisPorts" -}}
{{- $ports := list (int .Values.redis.port) -}}
{{- range .Values.redis.addresses -}}{{- $ports = append $ports (regexFind "[0-9]+$" . | int) -}}{{- end -}}
{{- uniq $ports | toJson -}}
{{- end -}}

{{/* Credentials as environment variables. Takes (dict "root" "role"), the role being api, worker or jobs. */}}
{{- define "diffleet.redisCredentials" -}}
{{- $auth := .root.Values.redis.auth -}}
{{- if $auth.existingSecret }}
{{- with get $auth.usernameKeys .role }}
- name: DIFFLEET_REDIS_USERNAME
  valueFrom:
    secretKeyRef:
      name: {{ $auth.existingSecret | quote }}
      key: {{ . | quote }}
{{- end }}
- name: DIFFLEET_REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ $auth.existingSecret | quote }}
      key: {{ get $auth.passwordKeys .role | quote }}
{{- end }}
{{- end -}}

{{- define "diffleet.redisCaVolume" -}}
{{- with .Values.redis.tls }}
{{- if and .enabled .caSecret }}
- name: redis-ca
  secret:
    secretName: {{ .caSecret | quote }}
    defaultMode: 0440
    items:
      - key: {{ .caKey | quote }}
        path: ca.crt
{{- end }}
{{- end }}
{{- end -}}

{{- define "diffleet.redisCaMount" -}}
{{- if and .Values.redis.tls.enabled .Values.redis.tls.caSecret }}
- name: redis-ca
  mountPath: /etc/diffleet/redis
  readOnly: true
{{- end }}
{{- end -}}

{{/* Whether KEDA needs a TriggerAuthentication: "true" or nothing. */}}
{{- define "diffleet.triggerAuth" -}}
{{- if or .Values.redis.auth.existingSecret (and .Values.redis.tls.enabled .Values.redis.tls.caSecret) -}}true{{- end -}}
{{- end -}}

{{/* KEDA's scaler for this kind of Redis. */}}
{{- define "diffleet.triggerType" -}}
{{- get (dict "server" "redis-streams" "sentinel" "redis-sentinel-streams" "cluster" "redis-cluster-streams") .Values.redis.kind -}}
{{- end -}}

{{/* Trigger metadata that reaches Redis. With a private authority TLS is switched on by the TriggerAuthentication. */}}
{{- define "diffleet.triggerAddress" -}}
{{- $redis := .Values.redis -}}
{{- if eq $redis.kind "server" -}}
address: {{ printf "%s:%d" (include "diffleet.redisHost" .) (int $redis.port) | quote }}
{{- else -}}
addresses: {{ join "," $redis.addresses | quote }}
{{- end }}
{{- if eq $redis.kind "sentinel" }}
sentinelMaster: {{ $redis.service | quote }}
{{- end }}
{{- if ne $redis.kind "cluster" }}
databaseIndex: {{ int $redis.db | quote }}
{{- end }}
{{- if and $redis.tls.enabled (not $redis.tls.caSecret) }}
enableTLS: "true"
{{- end }}
{{- end -}}

{{/* Peers of the network policies' rule for Redis, YAML list; nothing means refused by the validation. */}}
{{- define "diffleet.redisPeers" -}}
{{- $policy := .Values.redis.networkPolicy -}}
{{- if .Values.devRedis.enabled }}
- podSelector:
    matchLabels:
      {{- include "diffleet.selectorLabels" (dict "root" . "component" "redis") | nindent 6 }}
{{- else }}
{{- range $policy.cidrs }}
- ipBlock:
    cidr: {{ . | quote }}
{{- end }}
{{- if or $policy.podSelector $policy.namespaceSelector }}
- podSelector:
    {{- toYaml $policy.podSelector | nindent 4 }}
  namespaceSelector:
    {{- toYaml $policy.namespaceSelector | nindent 4 }}
{{- else if not $policy.cidrs }}
{{- $peers := list -}}
{{- $known := true -}}
{{- range $host := include "diffleet.redisHosts" . | fromJsonArray -}}
{{- if regexMatch "^[0-9]+(\\.[0-9]+){3}$" $host -}}
{{- $peers = append $peers (dict "ipBlock" (dict "cidr" (printf "%s/32" $host))) -}}
{{- else if or (not (contains "." $host)) (regexMatch "\\.svc(\\.cluster\\.local)?\\.?$" $host) -}}
{{- $peers = append $peers (dict "namespaceSelector" (dict)) -}}
{{- else -}}
{{- $known = false -}}
{{- end -}}
{{- end -}}
{{- if $known }}
{{ uniq $peers | toYaml }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
