{{- define "kvmig.name" -}}
{{- if contains "kvmig" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-kvmig" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvmig.selector" -}}
app.kubernetes.io/name: kvmig
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvmig.labels" -}}
{{ include "kvmig.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "kvmig.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* How long the pod of an instance may take to leave. */}}
{{- define "kvmig.leaveSeconds" -}}
{{- add (mul 2 (int .Values.drain.forecastSeconds)) (int .Values.drain.startSeconds) -}}
{{- end -}}

{{- define "kvmig.environment" -}}
- name: PATH
  value: /opt/kvmig/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- with .Values.huggingFace.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: token}}
{{- end }}
{{- with .Values.traces.endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
- name: OTEL_TRACES_SAMPLER
  value: parentbased_traceidratio
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ $.Values.traces.samplerRatio | quote }}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The environment of `kvmig up`: the database besides. */}}
{{- define "kvmig.fleetEnvironment" -}}
- name: KVMIG_DATA
  value: /data
{{- if or .Values.database.url .Values.database.existingSecret }}
- name: KVMIG_DATABASE
  valueFrom:
    secretKeyRef:
      name: {{ .Values.database.existingSecret | default (printf "%s-database" (include "kvmig.name" .)) | quote }}
      key: url
{{- end }}
{{ include "kvmig.environment" . }}
{{- end -}}

{{- define "kvmig.securityContext" -}}
allowPrivilegeEscalation: false
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kvmig.probes" -}}
startupProbe:
  httpGet: {path: /live, port: http}
  periodSeconds: 5
  failureThreshold: 360
readinessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 2
  timeoutSeconds: 2
livenessProbe:
  httpGet: {path: /live, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
{{- end -}}

{{- define "kvmig.mounts" -}}
- {name: shm, mountPath: /dev/shm}
{{- if .Values.models.existingClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvmig.volumes" -}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory | quote }}}
{{- with .Values.models.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . | quote }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvmig.podLabels" -}}
{{ include "kvmig.labels" . }}
{{- with .Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvmig.placement" -}}
{{- with .Values.serviceAccount.name }}
serviceAccountName: {{ . | quote }}
{{- end }}
automountServiceAccountToken: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
{{ toYaml . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
{{ toYaml . | indent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
{{ toYaml . }}
{{- end }}
{{- with .Values.affinity }}
affinity:
{{ toYaml . | indent 2 }}
{{- end }}
{{- end -}}
