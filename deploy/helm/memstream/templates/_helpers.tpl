{{- define "memstream.selector" -}}
app.kubernetes.io/name: memstream
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "memstream.labels" -}}
{{ include "memstream.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
{{- define "memstream.name" -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end }}
