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
{{- printf "%s://%s:%d/%d" ($redis.tls.enabled | ternary "rediss" "redis") (include "diffleet.redisHost" .) (int $redis.port) (int $redis.db) -}}
{{- if and $redis.tls.enabled $redis.tls.caSecret -}}?ssl_ca_certs=/etc/diffleet/redis/ca.crt{{- end -}}
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

{{/* Trigger metadata that reaches Redis. With a private authority TLS is switched on by the TriggerAuthentication. */}}
{{- define "diffleet.triggerAddress" -}}
address: {{ printf "%s:%d" (include "diffleet.redisHost" .) (int .Values.redis.port) | quote }}
databaseIndex: {{ int .Values.redis.db | quote }}
{{- if and .Values.redis.tls.enabled (not .Values.redis.tls.caSecret) }}
enableTLS: "true"
{{- end }}
{{- end -}}

{{/* Peers of the network policies' rule for Redis, YAML list; nothing means refused by the validation. */}}
{{- define "diffleet.redisPeers" -}}
{{- $policy := .Values.redis.networkPolicy -}}
{{- $host := include "diffleet.redisHost" . -}}
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
{{- if regexMatch "^[0-9]+(\\.[0-9]+){3}$" $host }}
- ipBlock:
    cidr: {{ printf "%s/32" $host | quote }}
{{- else if or (not (contains "." $host)) (regexMatch "\\.svc(\\.cluster\\.local)?\\.?$" $host) }}
- namespaceSelector: {}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
