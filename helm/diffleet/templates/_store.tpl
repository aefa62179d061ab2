{{/* The folder with adapters, which the api and every worker see. Each takes the root; nothing without a volume. */}}
{{- define "diffleet.storeConfig" -}}
{{- with .Values.modelStore }}
{{- if or .claimName .hostPath }}
DIFFLEET_MODEL_STORE: {{ .path | trimAll "/" | printf "/store/%s" | trimSuffix "/" | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "diffleet.storeMount" -}}
{{- with .Values.modelStore }}
{{- if or .claimName .hostPath }}
- name: store
  mountPath: /store
  readOnly: true
{{- end }}
{{- end }}
{{- end -}}

{{- define "diffleet.storeVolume" -}}
{{- with .Values.modelStore }}
{{- if .claimName }}
- name: store
  persistentVolumeClaim:
    claimName: {{ .claimName | quote }}
    readOnly: true
{{- else if .hostPath }}
- name: store
  hostPath:
    path: {{ .hostPath | quote }}
    type: Directory
{{- end }}
{{- end }}
{{- end -}}
