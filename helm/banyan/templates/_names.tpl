{{- define "banyan.name" -}}
{{- printf "%s" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "banyan.labels" -}}
app.kubernetes.io/name: banyan
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "banyan.selector" -}}
app.kubernetes.io/name: banyan
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "banyan.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "banyan.secretName" -}}
{{ .Values.secret.existingSecret | default (printf "%s-cluster" (include "banyan.name" .)) }}
{{- end -}}

{{- define "banyan.redisSecretName" -}}
{{- if eq .Values.kvstore.redis.kind "external" -}}
{{ .Values.kvstore.redis.existingSecret }}
{{- else -}}
{{ include "banyan.name" . }}-cache
{{- end -}}
{{- end -}}

{{/* The pod's own volume for the disk tier: "ephemeral", "claim", or nothing. */}}
{{- define "banyan.nvmeVolume" -}}
{{- if and .Values.kvstore.nvme.gib (not .Values.kvstore.nvme.path) -}}
{{ ternary "ephemeral" "claim" (ne false .Values.kvstore.nvme.ephemeral) }}
{{- end -}}
{{- end -}}

{{/* What the tier may take, and the GiB it leaves free. */}}
{{- define "banyan.nvmeSize" -}}
{{ add (ceil .Values.kvstore.nvme.gib) 2 }}Gi
{{- end -}}

{{/* Restricted pod security: everything runs as an ordinary user on a read-only root. */}}
{{- define "banyan.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "banyan.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "banyan.env" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: BANYAN_HOME
  value: /var/lib/banyan
- name: HOME
  value: /tmp
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ include "banyan.secretName" . }}, key: ray}
# replicas go on serving while the Ray head is away
- name: RAY_gcs_rpc_server_reconnect_timeout_s
  value: "86400"
{{- end -}}
